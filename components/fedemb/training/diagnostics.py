"""Un-noised diagnostics of every round, for the data owner only. Raw.

The number of participating clients is secret (publishing it would weaken the guarantee), and so is
everything computed from client updates before noise. All of it is written to the private root, as
`diagnostics.jsonl` and as TensorBoard event files.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import json
import time
from typing import Any

import numpy as np

from fedemb.engine.round_loop import Round
from fedemb.engine.rounds import STATISTICS
from fedemb.privacy.mechanisms.mechanism import MechanismPlan
from fedemb.storage import Store

_FILE = "diagnostics.jsonl"


def describe(done: Round[object], plan: MechanismPlan) -> dict[str, float]:
    """Returns the diagnostics of one round.

    Args:
      done: the round, with its un-noised sums.
      plan: plan of the mechanism.
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
    figures["mean_norm"] = signal * l2_norm_clip / plan.normalizer
    figures["noise_to_signal"] = noise / signal if signal else 0.0
    return figures | {f"seconds_{name}": value for name, value in done.seconds.items()}


class Diagnostics:
    """Writes round diagnostics to the private root.

    Args:
      store: `<private_root>/<run_id>/diagnostics`; a superseded trainer changes nothing there.
      first_round: lines of this and later rounds, written by a killed trainer, are dropped.
    """

    def __init__(self, store: Store, first_round: int) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._store = store
        try:
            before = [json.loads(line) for line in store.read(_FILE).splitlines()]
        except FileNotFoundError:
            before = []
        self._lines = [line for line in before if line["round"] < first_round]
        self._started = time.time()
        self._events = io.BytesIO()
        self._writer = RecordWriter(self._events)
        self._written = 0

    def write(self, index: int, figures: dict[str, float]) -> None:
        """Adds the diagnostics of a round."""
        from tensorboard.compat.proto import summary_pb2

        summaries: Any = summary_pb2
        self._lines.append({"round": index, **figures})
        if not self._events.tell():
            self._add_event(wall_time=self._started, file_version="brain.Event:2")
        values = [
            summaries.Summary.Value(tag=f"not DP/{name}", simple_value=value)
            for name, value in figures.items()
        ]
        self._add_event(wall_time=time.time(), step=index, summary=summaries.Summary(value=values))

    def flush(self) -> None:
        """Writes the lines, and the events if they grew by a tenth since they were written.

        Raises:
          Superseded: the step was started again meanwhile.
        """
        lines = (json.dumps(line, sort_keys=True) + "\n" for line in self._lines)
        self._store.write(_FILE, "".join(lines).encode())
        if self._events.tell() > 1.1 * self._written:
            self._write_events()

    def close(self) -> None:
        """Writes all lines and events; raises as `flush`."""
        self.flush()
        if self._events.tell() > self._written:
            self._write_events()

    def _write_events(self) -> None:
        name = f"events.out.tfevents.{self._started:.6f}.rounds"  # TensorBoard's pattern
        self._store.write(f"tensorboard/{name}", self._events.getvalue())
        self._written = self._events.tell()

    def _add_event(self, **fields: object) -> None:
        from tensorboard.compat.proto import event_pb2

        kinds: Any = event_pb2
        self._writer.write(kinds.Event(**fields).SerializeToString())
