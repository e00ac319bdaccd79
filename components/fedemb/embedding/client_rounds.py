"""The round of virtual clients on the backend that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedemb.config import TrainingConfig
from fedemb.embedding.round_kind import RoundKind
from fedemb.embedding.rounds import RoundFunction


def client_rounds(
    backbone: Any,
    mechanism: Any,
    training: TrainingConfig,
    *,
    variables: Sequence[Any],
    workers: int,
    devices: Sequence[str] | None = None,
    shared_head_rows: int = 0,
) -> RoundKind:
    """`RoundFunction`, or the same on JAX.

    Args:
      backbone: see `RoundFunction`, as are `mechanism`, `variables` and `shared_head_rows`.
      mechanism: clips and rounds each update.
      training: backend, local training, seed.
      variables: that train.
      workers: of TensorFlow.
      devices: of TensorFlow. JAX takes all there are.
      shared_head_rows: DP-FedAvg.
    """
    shared: dict[str, Any] = {
        "variables": variables,
        "seed": training.seed,
        "shared_head_rows": shared_head_rows,
    }
    if training.backend == "jax":
        from fedemb.embedding.jax_client_rounds import JaxRoundFunction

        clients = training.parallel_clients
        return JaxRoundFunction(
            backbone, mechanism, training.local, parallel_clients=clients, **shared
        )
    return RoundFunction(
        backbone, mechanism, training.local, workers=workers, devices=devices, **shared
    )
