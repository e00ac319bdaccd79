"""Groups of mutants: which code is changed, and which tests may notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]


class Group(NamedTuple):
    """Code below `components/` that is changed, and tests below `tests/` that may notice."""

    code: tuple[str, ...]
    tests: tuple[str, ...]

    def files(self) -> list[Path]:
        """The Python files of the code."""
        places = [REPOSITORY / "components" / place for place in self.code]
        return [
            path
            for place in places
            for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
        ]


_LEDGER = ("components/ledger", "components/reserve_budget", "components/private_inputs")
_AUDIT = ("components/privacy/test_privacy_auditing.py", "statistical/test_independence.py")
_ROUNDS = (
    *("rounds", "unit_gradient", "head_gradient", "kernel_gradients", "least_squares_head"),
    "covariance_projection",
    *("gradient_sums", "packed_state", "server", "feed", "feature_cache"),
    "frozen_features",
)
_TRAINERS = (
    "components/train_dp_fedemb/test_train_run.py",
    "components/train_dp_fedemb/test_train_client_loader.py",
    "components/train_dp_sgd/test_train_sgd_run.py",
    "components/training",
    "components/simulation",
)
GROUPS: dict[str, Group] = {
    "gate": Group(("fedemb/gate",), ("components/gate",)),
    "ledger": Group(("fedemb/ledger",), _LEDGER),
    "keys": Group(
        ("fedemb/keys",),
        (
            *_LEDGER,
            "components/gate/test_gate_approvals.py",
            "components/release/test_release_model.py",
            "components/training/test_training_state.py",
            "components/partition_users/test_partition_resumed.py",
        ),
    ),
    "privacy": Group(
        ("fedemb/privacy",),
        (
            *("components/privacy", "planted_bugs/test_planted_bugs.py"),
            "components/embedding/test_embedding_head_gradient.py",
            "components/embedding/test_embedding_least_squares_head.py",
            "components/embedding/test_embedding_covariance_projection.py",
        ),
    ),
    "engine": Group(
        ("fedemb/engine",),
        (
            *(f"components/embedding/test_embedding_{name}.py" for name in _ROUNDS),
            *_AUDIT,
            "components/training/test_training_audit.py",
            "planted_bugs/test_planted_engine.py",
        ),
    ),
    "training": Group(("fedemb/training", "train_dp_fedemb", "train_dp_sgd"), _TRAINERS),
}
WARM = {"gate": "test_good_run_is_allowed_without_reasons"}
"""A test that runs before any mutant, beside the quickest, because its session shares more."""
ELSEWHERE = ("fedemb/engine/jax/", "hosts.py", "secret_manager.py")
"""Code whose tests run it in processes of their own, where a function that was replaced in the
process of the tests is not the one that runs."""
LEFT_OUT = ("kill", "race", "hosts", "year", "speed", "concurrency")
"""Names of test files that start processes of their own, or take minutes."""


def group_of(file: str) -> str | None:
    """The group that tries a file."""
    below = file.removeprefix("components/")
    for name, group in GROUPS.items():
        if below.startswith(group.code):
            return name
    return None


def files() -> list[str]:
    """The files that are changed, relative to the repository."""
    paths = {path for group in GROUPS.values() for path in group.files()}
    names = sorted(str(path.relative_to(REPOSITORY)) for path in paths)
    return [name for name in names if not any(part in name for part in ELSEWHERE)]
