"""`fedemb bench --accelerator` on a small net, in a process that cannot import TensorFlow.

`python -m tests.kit.jax.bench_without_tensorflow FILE [endless]`: then its first measurement is
one that the device never ends.
"""

import sys

from fedemb.engine.jax import speed as jax_speed
from fedemb.pipelines.cli.main import app
from tests.kit.jax.without_tensorflow import forbid

jax_speed.MICROBATCHES, jax_speed.VIEWS, jax_speed.PLAIN_BATCH = (4,), (1, 2), 16
jax_speed.WORKLOADS = {
    "W": jax_speed.ClientWorkload("tiny", 12, 1, clients=2, examples=4, batch_size=2, epochs=1)
}


def _endless(_model):
    import jax

    yield jax.jit(lambda: jax.lax.while_loop(lambda x: x == 0, lambda x: x * 2, 0))().item()


if __name__ == "__main__":
    forbid()
    words = ["bench", "--accelerator", "--backbone", "tanh_cnn", "--image-size", "8"]
    seconds = "900"  # all of them, on a busy machine too
    if "endless" in sys.argv:
        jax_speed._measurements, seconds = _endless, "2"
    app([*words, "--seconds", seconds, "--output", sys.argv[1]])
