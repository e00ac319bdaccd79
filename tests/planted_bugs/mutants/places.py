"""Tests that must turn red on many bugs."""

from __future__ import annotations

from tests.planted_bugs.edits import Edit
from tests.planted_bugs.mutation import Mutant

_SOUND = "tests/planted_bugs/test_planted_bugs.py::test_the_sound_system_is_green_in_every_layer"
REPLAY = (f"{_SOUND}[record_replay]",)
PROBE = (f"{_SOUND}[zero_probe]",)
AGAIN = (f"{_SOUND}[replay_with_other_data]",)
COINS = (f"{_SOUND}[coin_chi_square]",)
QUERIES = "tests/components/privacy/test_privacy_queries.py"
PLAN = "tests/components/privacy/test_privacy_plan.py"
POISSON = "tests/components/privacy/test_poisson_gaussian.py"
UNITS = "tests/components/embedding/test_embedding_unit_gradient.py"
AUDITING = "tests/components/privacy/test_privacy_auditing.py"
INDEPENDENT = ("tests/statistical/test_independence.py",)
"""Noise and coins are compared with each other."""
AUDIT = (
    "tests/components/training/test_training_audit.py::test_sound_training_passes[train_dp_fedemb]",
)
"""A training that must pass the audit of its mechanism."""


def one(number: int, name: str, edit: tuple[str, str, str, str], *tests: str) -> Mutant:
    """A bug of one edit: module, function, code and its replacement."""
    return several(number, name, (edit,), tests)


def several(
    number: int, name: str, edits: tuple[tuple[str, str, str, str], ...], tests: tuple[str, ...]
) -> Mutant:
    """A bug of several edits, applied in order."""
    return Mutant(number, name, tuple(Edit(*edit) for edit in edits), tests)
