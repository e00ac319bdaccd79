"""What the data owner may look at, and nobody else: un-noised figures of every round. Raw.

The number of clients that took part is secret (it would cost the guarantee), and so is everything
computed from their updates before noise. All of it goes to the private root, as `diagnostics.jsonl`
and as TensorBoard event files.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.embedding.round_loop import Round
from fedemb.embedding.rounds import STATISTICS
from fedemb.storage import Store, put_tree

_FILE = "diagnostics.jsonl"


def describe(done: Round, plan: Any) -> dict[str, float]:
    """Figures of one round.

    Args:
      done: the round, with its un-noised sums.
      plan: the `MechanismPlan`.
    """
    sums, l2_norm_clip = done.sums, done.l2_norm_clip
    columns = dict(zip(STATISTICS, sums.clients.T, strict=True))
    norms = columns["norm"][np.isfinite(columns["norm"])]
    clients = len(columns["norm"])
    figures = {
        "clients": float(clients),
        "examples": float(columns["examples"].sum()),
        "nonfinite": float(clients - len(norms)),
        "l2_norm_clip": l2_norm_clip,
    }
    if len(norms):
        figures |= {
            "clipped": float(np.mean(norms > l2_norm_clip)),
            "norm_median": float(np.median(norms)),
            "norm_p90": float(np.quantile(norms, 0.9)),
            "norm_max": float(norms.max()),
        }
        for name in ("first_loss", "last_loss"):
            losses = columns[name][np.isfinite(columns[name])]
            if len(losses):
                figures[name] = float(losses.mean())
    total = np.asarray(sums.sample_state[0], np.float64)
    signal = float(np.linalg.norm(total)) / 2.0**plan.grid_bits
    noise = plan.noise_multiplier * float(np.sqrt(len(total)))
    figures["mean_norm"] = signal * l2_norm_clip / plan.normaliser
    figures["noise_to_signal"] = noise / signal if signal else 0.0
    return figures | {f"seconds_{name}": value for name, value in done.seconds.items()}


class Diagnostics:
    """Writes figures of rounds below the private root.

    Args:
      store: `<private_root>/<run_id>/diagnostics`.
      first_round: lines of this round and later ones, left by a killed trainer, are dropped.
    """

    def __init__(self, store: Store, first_round: int) -> None:
        self._store = store
        try:
            before = [json.loads(line) for line in store.read(_FILE).splitlines()]
        except FileNotFoundError:
            before = []
        self._lines = [line for line in before if line["round"] < first_round]
        self._remote = None if store.local_root else tempfile.TemporaryDirectory()
        base = store.local_root or Path(self._remote.name if self._remote else "")
        self._folder = base / "tensorboard"
        self._events: Any = None

    def write(self, index: int, figures: dict[str, float]) -> None:
        """Adds the figures of a round."""
        import tensorflow as tf

        self._lines.append({"round": index, **figures})
        if self._events is None:
            # Raw operations: `tf.summary` would import all of TensorBoard first, 2 seconds.
            self._folder.mkdir(parents=True, exist_ok=True)
            self._events = tf.raw_ops.SummaryWriter(shared_name=f"rounds_{id(self)}", container="")
            tf.raw_ops.CreateSummaryFileWriter(
                writer=self._events,
                logdir=str(self._folder),
                max_queue=tf.constant(100),
                flush_millis=tf.constant(10_000),
                filename_suffix=".rounds",
            )
        for name, value in figures.items():
            tf.raw_ops.WriteScalarSummary(
                writer=self._events,
                step=tf.constant(index, tf.int64),
                tag=f"not DP/{name}",
                value=tf.constant(value, tf.float32),
            )

    def flush(self) -> None:
        """Brings everything so far to the store."""
        import tensorflow as tf

        lines = (json.dumps(line, sort_keys=True) + "\n" for line in self._lines)
        self._store.write(_FILE, "".join(lines).encode())
        if self._events is not None:
            tf.raw_ops.FlushSummaryWriter(writer=self._events)

    def close(self) -> None:
        """Flushes, closes the event file and publishes it to a remote private root."""
        import tensorflow as tf

        self.flush()
        if self._events is not None:
            tf.raw_ops.CloseSummaryWriter(writer=self._events)
            if self._remote:
                put_tree(self._folder, f"{self._store.uri}/tensorboard")
        if self._remote:
            self._remote.cleanup()
