"""`fedemb run` as a user types it, in a process of its own."""

import subprocess
import sys
from pathlib import Path

SMALL_EMBEDDING = [
    "data.builtin.users=400",
    "data.builtin.images_per_user=3",
    "data.builtin.public_classes=8",
    "data.builtin.public_images_per_class=4",
    "partition.virtual_clients=30",
    "policy.users_lower_bound=300",
    "policy.delta=1e-3",
    "pretraining.epochs=1",
    "release.min_gain_over_public=null",  # three rounds of a few hundred people gain nothing
    "mechanism.rounds=3",
    "mechanism.noise_multiplier=1.5",
    "evaluation.bootstrap_samples=20",
    "audit.bootstrap_samples=20",
    "audit.max_users=40",
]
"""`quickstart` in seconds, still a release."""
CLASSIFIER_ROUNDS = 4
SMALL_CLASSIFIER = [
    "data.builtin.users=300",
    "data.builtin.images_per_user=2",
    "data.builtin.public_classes=4",
    "data.builtin.public_images_per_class=4",
    "partition.max_images_per_user=2",
    "pretraining.epochs=1",
    "model.embedding_dim=8",
    f"mechanism.rounds={CLASSIFIER_ROUNDS}",
    "training.server.learning_rate=0.0001",  # four rounds give no useful probabilities
    "mechanism.units_per_round=20",
    "mechanism.noise_multiplier=2.0",
    "training.unit_gradient.images_per_unit=2",
    "training.unit_gradient.microbatch=8",
    "policy.users_lower_bound=240",
    "policy.delta=1e-3",
    "release.min_gain_over_public=null",  # four rounds of a few people gain nothing
    "evaluation.bootstrap_samples=20",
    "audit.bootstrap_samples=20",
    "audit.max_users=40",
]
"""`dp_sgd_quickstart` in seconds, still a release."""


def fedemb(*words: str) -> list[str]:
    """A command line."""
    return [sys.executable, "-m", "fedemb", *words]


def run_command(runs: Path, *extra: str, overrides: list[str] = SMALL_EMBEDDING) -> list[str]:
    """`fedemb run` with `--set` for each override."""
    settings = [part for item in overrides for part in ("--set", item)]
    return fedemb("run", "--runs", str(runs), *settings, *extra)


def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, ten minutes at most."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def closing_line(output: str, name: str) -> str:
    """Returns the text after `name: ` in the only line with this start."""
    found = [text for text in output.splitlines() if text.startswith(f"{name}: ")]
    assert len(found) == 1, output
    return found[0].split(": ", 1)[1]
