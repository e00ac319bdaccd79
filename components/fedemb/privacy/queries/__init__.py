"""The mechanism at work: clip, exact sum, noise and price, in one object for each attempt.

Without TensorFlow, but for `dp_query`, which puts it under tensorflow-privacy's protocol.
"""

from fedemb.privacy.queries.build import build_mechanism as build_mechanism
from fedemb.privacy.queries.clipped_sum import ClippedSum as ClippedSum
from fedemb.privacy.queries.clipped_sum import Record as Record
from fedemb.privacy.queries.running import KeylessMechanism as KeylessMechanism
from fedemb.privacy.queries.running import Mechanism as Mechanism
from fedemb.privacy.queries.running import RoundOutput as RoundOutput
