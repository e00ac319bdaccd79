"""Image embedding models with user-level differential privacy.

Three tiers, each made of the one before:

building blocks  backbones and losses, a mechanism's plan and its price, queries, the round
                 function, the server's step, metrics
`Simulation`     a private training on arrays in memory; never releases
`run`            the pipeline: ledger, training, audit, gate, release

    >>> import fedemb
    >>> mechanism = fedemb.GroupPoissonGaussianConfig(
    ...     rounds=30, sampling_probability=0.1, noise_multiplier=0.83)
    >>> print(fedemb.guarantee(fedemb.plan(mechanism, virtual_clients=900), delta=1e-5))
    ... # doctest: +ELLIPSIS
    (7.553, 1e-05)-differential privacy for one user with everything they own, if ...

Names are imported when they are first used: `import fedemb` imports nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from fedemb.engine import ClientExamples as ClientExamples
    from fedemb.engine import Feed as Feed
    from fedemb.engine import Round as Round
    from fedemb.engine import RoundFunction as RoundFunction
    from fedemb.engine import RoundSums as RoundSums
    from fedemb.engine import assign_weights as assign_weights
    from fedemb.engine import build_backbone as build_backbone
    from fedemb.engine import build_loss as build_loss
    from fedemb.engine import configure_threads as configure_threads
    from fedemb.engine import embed as embed
    from fedemb.engine import initial_state as initial_state
    from fedemb.engine import load_backbone as load_backbone
    from fedemb.engine import pretrain as pretrain
    from fedemb.engine import released_weights as released_weights
    from fedemb.engine import run_rounds as run_rounds
    from fedemb.engine import save_backbone as save_backbone
    from fedemb.engine import server_step as server_step
    from fedemb.engine import train_centralized as train_centralized
    from fedemb.engine import trainable_variables as trainable_variables
    from fedemb.errors import FedEmbError as FedEmbError
    from fedemb.evaluation.metrics import arrange as arrange
    from fedemb.evaluation.metrics import recall as recall
    from fedemb.evaluation.metrics import retrieve as retrieve
    from fedemb.evaluation.metrics import verify as verify
    from fedemb.evaluation.pairs import Estimate as Estimate
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
    from fedemb.training.simulation import Simulation as Simulation
    from fedemb.training.simulation import SimulationResult as SimulationResult

_NAMES = {
    "config": (
        "AugmentationConfig EvaluationConfig LocalTrainingConfig LossConfig MechanismConfig "
        "ModelConfig PretrainingConfig RunConfig ServerConfig TrainingConfig"
    ),
    "data.builtin": "ArrayUsers glyphs",
    "engine": (
        "ClientExamples Feed Round RoundFunction RoundSums assign_weights build_backbone "
        "build_loss configure_threads embed initial_state load_backbone pretrain "
        "released_weights run_rounds save_backbone server_step train_centralized "
        "trainable_variables"
    ),
    "errors": "FedEmbError",
    "evaluation.metrics": "arrange recall retrieve verify",
    "evaluation.pairs": "Estimate",
    "pipelines.run.command": "run",
    "pipelines.run.load_config": "load_config",
    "privacy.accounting": "price",
    "privacy.guarantee": "PrivacyGuarantee",
    "privacy.group_mechanisms": "GroupPoissonGaussianConfig TreeAggregationConfig",
    "privacy.mechanism": "MechanismPlan",
    "privacy.unit_mechanisms": (
        "CappedImagePoissonConfig CovarianceConfig LeastSquaresConfig PoissonGaussianConfig"
    ),
    "privacy.planning": "epsilon guarantee plan",
    "privacy.running": "Mechanism build_mechanism",
    "training.simulation": "Simulation SimulationResult",
}
"""Module to the public names in it; the imports above say the same to type checkers."""
_PLACES = {name: f"fedemb.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_PLACES)  # noqa: PLE0605  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for (PEP 562)."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fedemb' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
