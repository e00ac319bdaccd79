"""Features in micro-batches and one image at a time, in turn: seconds and their ratio.

    python -m tests.benchmarks.bench_feature_cache BACKBONE.keras [PAIRS]

The backbone is a `.keras` file, such as EfficientNet-Lite0 at 128 to 224 pixels. One core;
`--threads` uses all cores, as a training does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tests.benchmarks.tiny import TINY

IMAGES = 16 if TINY else 128


def main() -> None:
    """See the module."""
    words = [word for word in sys.argv[1:] if word != "--threads"]
    path, pairs = Path(words[0]), int(words[1]) if len(words) > 1 else 9
    if "--threads" not in sys.argv:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import numpy as np

    from fedemb.engine.micro_batches import SIZE, MicroBatches
    from fedemb.engine.threads import configure_threads
    from fedemb.models.loading import load_model

    configure_threads()
    trunk = load_model(path)
    together, alone = MicroBatches(trunk), MicroBatches(trunk)
    if together.size != SIZE:
        sys.exit(f"the probe of {path.name} failed: features depend on other images here")
    alone.size = 1
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, *trunk.input_shape[1:]), np.uint8)
    alone(images[:1])
    ratios, milliseconds = [], []
    for _ in range(pairs):
        seconds = []
        for net in (together, alone):
            start = time.perf_counter()
            net(images) if net is together else [net(image[None]) for image in images]
            seconds.append(time.perf_counter() - start)
        ratios.append(seconds[1] / seconds[0])
        milliseconds.append(1000 * seconds[0] / IMAGES)
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    sys.stdout.write(
        f"{path.name} at {trunk.input_shape[1]} pixels: {np.median(milliseconds):.2f} ms an image, "
        f"{middle:.2f} [{low:.2f}, {high:.2f}] times faster than one by one, "
        f"{pairs} pairs, load {os.getloadavg()[0]:.0f}\n"
    )


if __name__ == "__main__":
    main()
