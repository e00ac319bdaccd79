"""The mechanism at work: tensorflow-privacy's DPQuery protocol with our clip, sums and noise.

The only part of this package that imports TensorFlow. tensorflow-privacy gives the protocol and the
quantile estimator; it never draws noise (docs/privacy/noise.md#why-no-framework-draws-the-noise):
its generators repeat themselves under XLA, follow `tf.random.set_seed`, or start from the clock.
"""

from fedemb.privacy.queries.clipped_sum import AdaptiveClippedSumQuery as AdaptiveClippedSumQuery
from fedemb.privacy.queries.clipped_sum import ClippedSumQuery as ClippedSumQuery
from fedemb.privacy.queries.clipped_sum import GlobalState as GlobalState
from fedemb.privacy.queries.clipped_sum import Record as Record
from fedemb.privacy.queries.running import Mechanism as Mechanism
from fedemb.privacy.queries.running import RoundOutput as RoundOutput
from fedemb.privacy.queries.running import build_mechanism as build_mechanism
from fedemb.privacy.queries.running import require_declared as require_declared
