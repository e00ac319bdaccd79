"""Configuration of a run: frozen, versioned, and validated before any step starts.

Contains data only: no module here reads user files or imports a framework. Every field documents
its unit and bounds. `fedemb config all` prints them.
"""

from fedemb.config.data import ONE_COHORT as ONE_COHORT
from fedemb.config.data import BuiltinData as BuiltinData
from fedemb.config.data import Columns as Columns
from fedemb.config.data import DataConfig as DataConfig
from fedemb.config.data import EvaluationByHash as EvaluationByHash
from fedemb.config.data import EvaluationByValue as EvaluationByValue
from fedemb.config.data import PartitionConfig as PartitionConfig
from fedemb.config.data import SourceConfig as SourceConfig
from fedemb.config.policy import AuditConfig as AuditConfig
from fedemb.config.policy import EvaluationConfig as EvaluationConfig
from fedemb.config.policy import PolicyConfig as PolicyConfig
from fedemb.config.policy import ReleaseConfig as ReleaseConfig
from fedemb.config.policy import StorageConfig as StorageConfig
from fedemb.config.policy import TuningConfig as TuningConfig
from fedemb.config.run import FREE_SECTIONS as FREE_SECTIONS
from fedemb.config.run import AnyMechanism as AnyMechanism
from fedemb.config.run import BackboneConfig as BackboneConfig
from fedemb.config.run import RunConfig as RunConfig
from fedemb.config.training import AugmentationConfig as AugmentationConfig
from fedemb.config.training import LocalTrainingConfig as LocalTrainingConfig
from fedemb.config.training import LossConfig as LossConfig
from fedemb.config.training import ModelConfig as ModelConfig
from fedemb.config.training import PretrainingConfig as PretrainingConfig
from fedemb.config.training import ServerConfig as ServerConfig
from fedemb.config.training import TrainingConfig as TrainingConfig
from fedemb.config.training import UnitGradientConfig as UnitGradientConfig
from fedemb.foundation.section import Name as Name
from fedemb.foundation.section import Section as Section
from fedemb.privacy.section import MechanismConfig as MechanismConfig
