"""Training rounds: virtual clients, units, server step, JAX, audit evidence.

The mechanism does all clipping, summation, noise and accounting:

    >>> import secrets
    >>> import numpy as np
    >>> from fedemb.config import LocalTrainingConfig, ModelConfig, ServerConfig
    >>> from fedemb import GroupPoissonGaussianConfig, build_mechanism
    >>> from fedemb import plan as plan_of
    >>> plan = plan_of(GroupPoissonGaussianConfig(
    ...     rounds=2, noise_multiplier=1.0, sampling_probability=0.5), virtual_clients=8)
    >>> mechanism = build_mechanism(plan, secrets.token_bytes(32), "my-run", 1, "0" * 64)
    >>> backbone = build_backbone(ModelConfig(backbone="tiny", image_size=12, embedding_dim=8), 0)
    >>> train_round = RoundFunction(backbone, mechanism, LocalTrainingConfig(batch_size=4))
    >>> server = ServerConfig(learning_rate=0.5)
    >>> state = initial_state(train_round.initial_weights())
    >>> random = np.random.default_rng(0)
    >>> def example_client(group):
    ...     images = random.integers(0, 256, (6, 12, 12, 1), np.uint8)
    ...     return ClientExamples(0, group, images, labels=np.array([7, 7, 9, 9, 9, 5]))
    >>> for number in range(plan.rounds):
    ...     sums = train_round(state.weights, [example_client(0), example_client(3)], number)
    ...     output = mechanism.aggregate(number, sums.total)  # noised
    ...     state = server_step(server, state, output.mean, rounds=plan.rounds)
    >>> assign_weights(backbone.trainable_variables, released_weights(server, state))
    >>> embed(backbone, random.integers(0, 256, (5, 12, 12, 1), np.uint8)).shape
    (5, 8)

In a real run, `mechanism.sample_clients` selects the participants, and the root key comes from the
reservation. To train virtual clients in parallel, call `configure_threads` first and pass its
result as `workers`. TensorFlow is imported when a function is called, not with this package.
"""

from fedemb.models.backbone_files import load_backbone as load_backbone
from fedemb.models.backbone_files import save_backbone as save_backbone
from fedemb.models.backbones import build_backbone as build_backbone
from fedemb.models.backbones import check_backbone as check_backbone
from fedemb.models.backbones import trainable_variables as trainable_variables
from fedemb.models.inference import embed as embed
from fedemb.models.keras_backend import configure_threads as configure_threads
from fedemb.models.keras_backend import preprocess as preprocess
from fedemb.models.keras_backend import take_installed_backend
from fedemb.models.losses import build_loss as build_loss
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
from fedemb.training.tensorflow_clients import RoundFunction as RoundFunction

take_installed_backend()
