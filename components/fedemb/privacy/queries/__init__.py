"""The mechanism of an attempt: clipping, exact sum, noise and accounting in one object.

Only `dp_query` uses TensorFlow, to implement tensorflow-privacy's protocol.
"""

from fedemb.privacy.queries.arrays import Array as Array
from fedemb.privacy.queries.arrays import Parameters as Parameters
from fedemb.privacy.queries.clipped_sum import ClippedSum as ClippedSum
from fedemb.privacy.queries.clipped_sum import Record as Record
from fedemb.privacy.queries.running import KeylessMechanism as KeylessMechanism
from fedemb.privacy.queries.running import Mechanism as Mechanism
from fedemb.privacy.queries.running import MechanismState as MechanismState
from fedemb.privacy.queries.running import RoundOutput as RoundOutput
from fedemb.privacy.queries.running import RoundState as RoundState
from fedemb.privacy.queries.running import build_mechanism as build_mechanism
