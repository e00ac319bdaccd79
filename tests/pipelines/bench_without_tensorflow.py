"""`fedemb bench --accelerator` on a small net, in a process that cannot import TensorFlow."""

import sys

from typer.testing import CliRunner

from fedemb.embedding import jax_speed
from fedemb.pipelines.cli.main import app
from tests.components.embedding.without_tensorflow import forbid

jax_speed.MICROBATCHES, jax_speed.VIEWS, jax_speed.PLAIN_BATCH = (4,), (1, 2), 16
jax_speed.WORKLOADS = {
    "W": jax_speed.ClientWorkload("tiny", 12, 1, clients=2, examples=4, batch_size=2, epochs=1)
}

if __name__ == "__main__":
    forbid()
    words = ["bench", "--accelerator", "--backbone", "tanh_cnn", "--image-size", "8"]
    done = CliRunner().invoke(app, [*words, "--output", sys.argv[1]], catch_exceptions=False)
    sys.stdout.write(done.output)
    sys.exit(done.exit_code)
