"""The mechanism at work: tensorflow-privacy's DPQuery protocol with our clip, sums and noise.

The only part of this package that imports TensorFlow. tensorflow-privacy gives the protocol, the
quantile estimator and the tree; it never draws noise (dp.md 1.5): its generators repeat themselves
under XLA, follow `tf.random.set_seed`, or start from the clock.
"""

from fedemb.privacy.queries.clipped_sum import AdaptiveClippedSumQuery as AdaptiveClippedSumQuery
from fedemb.privacy.queries.clipped_sum import ClippedSumQuery as ClippedSumQuery
from fedemb.privacy.queries.clipped_sum import GlobalState as GlobalState
from fedemb.privacy.queries.clipped_sum import Record as Record
from fedemb.privacy.queries.running import Mechanism as Mechanism
from fedemb.privacy.queries.running import RoundOutput as RoundOutput
from fedemb.privacy.queries.running import build_mechanism as build_mechanism
from fedemb.privacy.queries.running import require_declared as require_declared
from fedemb.privacy.queries.tree_stream import TreeStream as TreeStream
