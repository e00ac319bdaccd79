"""The one configuration of a run: frozen, versioned, checked before anything starts.

Data only: nothing here reads files of the user or imports a framework. Every field says its unit
and bounds; `fedemb config describe` prints them and `tests/golden/run_config.schema.json` pins
them.
"""

from components.fedemb.config.data import ONE_COHORT as ONE_COHORT
from components.fedemb.config.data import BuiltinData as BuiltinData
from components.fedemb.config.data import Columns as Columns
from components.fedemb.config.data import DataConfig as DataConfig
from components.fedemb.config.data import EvaluationByHash as EvaluationByHash
from components.fedemb.config.data import EvaluationByValue as EvaluationByValue
from components.fedemb.config.data import PartitionConfig as PartitionConfig
from components.fedemb.config.data import SourceConfig as SourceConfig
from components.fedemb.config.mechanism import TRACKS_PARTICIPATION as TRACKS_PARTICIPATION
from components.fedemb.config.mechanism import AdaptiveClipConfig as AdaptiveClipConfig
from components.fedemb.config.mechanism import BltConfig as BltConfig
from components.fedemb.config.mechanism import FixedSizeConfig as FixedSizeConfig
from components.fedemb.config.mechanism import (
    GroupPoissonGaussianConfig as GroupPoissonGaussianConfig,
)
from components.fedemb.config.mechanism import MechanismConfig as MechanismConfig
from components.fedemb.config.mechanism import NotPrivateConfig as NotPrivateConfig
from components.fedemb.config.mechanism import TreeAggregationConfig as TreeAggregationConfig
from components.fedemb.config.mechanism import UserPoissonConfig as UserPoissonConfig
from components.fedemb.config.policy import AuditConfig as AuditConfig
from components.fedemb.config.policy import EvaluationConfig as EvaluationConfig
from components.fedemb.config.policy import PolicyConfig as PolicyConfig
from components.fedemb.config.policy import ReleaseConfig as ReleaseConfig
from components.fedemb.config.policy import StorageConfig as StorageConfig
from components.fedemb.config.policy import TuningConfig as TuningConfig
from components.fedemb.config.run import RunConfig as RunConfig
from components.fedemb.config.section import Name as Name
from components.fedemb.config.section import Section as Section
from components.fedemb.config.training import AugmentationConfig as AugmentationConfig
from components.fedemb.config.training import LocalTrainingConfig as LocalTrainingConfig
from components.fedemb.config.training import LossConfig as LossConfig
from components.fedemb.config.training import ModelConfig as ModelConfig
from components.fedemb.config.training import PretrainingConfig as PretrainingConfig
from components.fedemb.config.training import ServerConfig as ServerConfig
from components.fedemb.config.training import TrainingConfig as TrainingConfig
