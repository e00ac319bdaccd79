"""A search whose trials share the features of a frozen backbone, and one whose trials do not.

    python -m tests.benchmarks.bench_search [PAIRS]

Trains a head on a resnet18_gn at 32 pixels, three images for each of 200 users, for four trials;
in turn in one process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

TRIALS, USERS = 4, 200


def main() -> None:
    """See the module."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np

    from fedemb.steps.train_dp_sgd import train
    from fedemb.training import search
    from fedemb.training.feature_caches import FeatureCaches
    from tests.kit.pipeline_runs.training_run import ReadyRun, classifier_config, prepare

    recipes = {name: {"mechanism.l2_norm_clip": clip} for name, clip in (("a", 0.5), ("b", 1.0))}
    terms = {"mean_trials": 3, "law": "geometric", "recipes": recipes}
    settings = classifier_config(
        **{
            "model.trainable": "head",
            "model.backbone": "resnet18_gn",
            "model.image_size": 32,
            "mechanism.sampling_probability": 0.5,
            "mechanism.units_per_round": 100,
            "mechanism.rounds": 20,
            "policy.users_lower_bound": USERS,
            "training.unit_gradient": {"images_per_unit": 3, "microbatch": 4},
        },
        tuning={"data": "search", "method": "clips", "search": terms},
    )
    opened = FeatureCaches.open

    def own(caches, *arguments):
        caches.delete()
        return opened(caches, *arguments)

    seconds: dict[str, list[float]] = {"shared": [], "own": []}
    drawn = patch.object(search, "draw_recipes", lambda *_: ["a", "b"] * (TRIALS // 2))
    with tempfile.TemporaryDirectory() as folder, drawn:
        ready = prepare(Path(folder, "ready"), settings, users=USERS)
        for pair in range(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
            models: set[bytes] = set()
            for name, times in seconds.items():
                run = ReadyRun(Path(folder, f"{name}-{pair}"), settings)
                shutil.copytree(ready.root, run.root)
                alone = patch.object(FeatureCaches, "open", own)
                with alone if name == "own" else contextlib.nullcontext():
                    start = time.perf_counter()
                    train.run(run.context(), root_key=bytes(32))
                    times.append(time.perf_counter() - start)
                models.add((run.root / "model" / "backbone.keras").read_bytes())
            assert len(models) == 1, "models differ"
    ratios = np.divide(seconds["shared"], seconds["own"])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    sys.stdout.write(
        f"{TRIALS} trials: shared {np.median(seconds['shared']):.1f} s, "
        f"own {np.median(seconds['own']):.1f} s, ratio {middle:.2f} [{low:.2f}, {high:.2f}], "
        f"{len(ratios)} pairs, load {os.getloadavg()[0]:.0f}\n"
    )


if __name__ == "__main__":
    main()
