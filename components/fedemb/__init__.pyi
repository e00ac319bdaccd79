# The public names, each with the module it comes from; `__init__.py` imports them when first used.
from fedemb.config import AugmentationConfig as AugmentationConfig
from fedemb.config import EvaluationConfig as EvaluationConfig
from fedemb.config import LocalTrainingConfig as LocalTrainingConfig
from fedemb.config import LossConfig as LossConfig
from fedemb.config import MechanismConfig as MechanismConfig
from fedemb.config import ModelConfig as ModelConfig
from fedemb.config import PretrainingConfig as PretrainingConfig
from fedemb.config import RunConfig as RunConfig
from fedemb.config import ServerConfig as ServerConfig
from fedemb.config import TrainingConfig as TrainingConfig
from fedemb.data.builtin import ArrayUsers as ArrayUsers
from fedemb.data.builtin import glyphs as glyphs
from fedemb.errors import FedEmbError as FedEmbError
from fedemb.evaluation.metrics import arrange as arrange
from fedemb.evaluation.metrics import recall as recall
from fedemb.evaluation.metrics import retrieve as retrieve
from fedemb.evaluation.metrics import verify as verify
from fedemb.evaluation.pairs import Estimate as Estimate
from fedemb.models.backbone_files import load_backbone as load_backbone
from fedemb.models.backbone_files import save_backbone as save_backbone
from fedemb.models.backbones import build_backbone as build_backbone
from fedemb.models.backbones import trainable_variables as trainable_variables
from fedemb.models.inference import embed as embed
from fedemb.models.keras_backend import configure_threads as configure_threads
from fedemb.models.losses import build_loss as build_loss
from fedemb.pipelines.run.command import run as run
from fedemb.pipelines.run.load_config import load_config as load_config
from fedemb.privacy.accounting import price as price
from fedemb.privacy.group_mechanisms import (
    GroupPoissonGaussianConfig as GroupPoissonGaussianConfig,
)
from fedemb.privacy.group_mechanisms import (
    TreeAggregationConfig as TreeAggregationConfig,
)
from fedemb.privacy.guarantee import PrivacyGuarantee as PrivacyGuarantee
from fedemb.privacy.mechanism import MechanismPlan as MechanismPlan
from fedemb.privacy.planning import epsilon as epsilon
from fedemb.privacy.planning import guarantee as guarantee
from fedemb.privacy.planning import plan as plan
from fedemb.privacy.running import Mechanism as Mechanism
from fedemb.privacy.running import build_mechanism as build_mechanism
from fedemb.privacy.unit_mechanisms import (
    CappedImagePoissonConfig as CappedImagePoissonConfig,
)
from fedemb.privacy.unit_mechanisms import CovarianceConfig as CovarianceConfig
from fedemb.privacy.unit_mechanisms import LeastSquaresConfig as LeastSquaresConfig
from fedemb.privacy.unit_mechanisms import (
    PoissonGaussianConfig as PoissonGaussianConfig,
)
from fedemb.training.central import pretrain as pretrain
from fedemb.training.central import train_centralized as train_centralized
from fedemb.training.rounds import ClientExamples as ClientExamples
from fedemb.training.rounds import Feed as Feed
from fedemb.training.rounds import Round as Round
from fedemb.training.rounds import RoundSums as RoundSums
from fedemb.training.rounds import assign_weights as assign_weights
from fedemb.training.rounds import run_rounds as run_rounds
from fedemb.training.server import initial_state as initial_state
from fedemb.training.server import released_weights as released_weights
from fedemb.training.server import server_step as server_step
from fedemb.training.simulation import Simulation as Simulation
from fedemb.training.simulation import SimulationResult as SimulationResult
from fedemb.training.tensorflow_clients import RoundFunction as RoundFunction

__version__: str
