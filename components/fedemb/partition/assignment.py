"""Where a record goes: to training, to evaluation, or nowhere. A function of the record alone.

Held out are users, and with shared classes (`label_scope: global`) classes too. A record trains
only if neither its user nor its class is held out, and evaluates only if both are; what lies
between would put a held-out user or class into training, or the reverse, and is dropped. With
`partition.evaluation.by: value` a named column decides, and users and classes are taken to lie
inside one value (`fedemb check-data` tells if they do not); a user on both sides is held out whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fedemb.config import EvaluationByHash, EvaluationByValue, RunConfig
from fedemb.data.hashing import Hasher
from fedemb.data.identity import Cell, name_text

_REMEMBERED = 1 << 16


def columns_of(config: RunConfig) -> list[str]:
    """Columns the private source must have, besides the image."""
    columns = config.data.source.columns
    named = [columns.user_id, columns.label, columns.cohort, columns.subgroup]
    if config.partition.evaluation.by == "value":
        named.append(config.partition.evaluation.column)
    return list(dict.fromkeys(name for name in named if name))


@dataclass(frozen=True, slots=True)
class Assignment:
    """Decision about one record, made before its image is read."""

    user_key: bytes
    class_id: int
    held_out: bool
    """To evaluation rather than training."""
    dropped: str = ""
    """Why it goes nowhere; empty: it goes somewhere."""


class Assigner:
    """Decides about records; remembers the users and classes it saw last."""

    def __init__(
        self,
        config: RunConfig,
        hasher: Hasher,
        blocks: frozenset[str] | None,
    ):
        """Takes what decides.

        Args:
          config: source and partition sections are used.
          hasher: keyed hashes.
          blocks: ledger blocks whose users may train; None: all.
        """
        self._config, self._hasher, self._blocks = config, hasher, blocks
        columns = config.data.source.columns
        self._has_cohorts = columns.cohort is not None
        self._cohorts = frozenset(config.partition.cohorts)
        self._shared = config.data.source.label_scope == "global" and columns.label is not None
        named = map(name_text, config.model.classes)
        self._classes = {name: number for number, name in enumerate(named)}
        evaluation = config.partition.evaluation
        self._by_hash = evaluation if isinstance(evaluation, EvaluationByHash) else None
        self._listed: frozenset[str] = frozenset()
        if self._by_hash:
            self._listed = frozenset(map(str, map(name_text, self._by_hash.classes)))
            self._held_classes = hasher.held_out_classes(self._listed, self._by_hash.fraction)
        self._values: set[str | None] = set()
        if isinstance(evaluation, EvaluationByValue):
            self._values = {name_text(value) for value in evaluation.values} - {None}
        self._user = lru_cache(_REMEMBERED)(self._decide_user)
        self._class = lru_cache(_REMEMBERED)(self._decide_class)

    def assign(self, user_id: str, label: str, cohort: str | None, value: Cell) -> Assignment:
        """Decides about one record.

        Args:
          user_id: canonical.
          label: canonical class; empty if every user is one class.
          cohort: canonical; None without a cohort column.
          value: of the column that decides the split, if one does.
        """
        user_key, user_held, may_train = self._user(user_id)
        class_id, class_held = self._class(label, b"" if self._shared else user_key)
        if self._by_hash is None:
            user_held = class_held = name_text(value) in self._values
        dropped = ""
        if self._classes:  # users are held out, classes never: the list is public
            class_id, class_held = self._classes.get(label, -1), user_held
        if (self._classes and class_id == -1) or (self._listed and label not in self._listed):
            dropped = "dropped_unlisted_class"
        elif self._shared and user_held != class_held:
            dropped = "dropped_cross_split"
        elif not user_held and not may_train:
            dropped = "dropped_block_not_reserved"
        elif cohort is not None and cohort not in self._cohorts:
            dropped = "dropped_other_cohort"
        return Assignment(user_key, class_id, user_held, dropped)

    def block(self, user_key: bytes, cohort: str | None) -> str:
        """Ledger block of a user, `cohort/bucket`; without a cohort column all are of the one."""
        partition = self._config.partition
        name = cohort if cohort is not None else partition.cohorts[0]
        return f"{name}/{self._hasher.bucket(user_key, partition.blocks_per_cohort)}"

    def may_train(self, user_key: bytes, cohort: str | None) -> bool:
        """Whether the user's block is reserved."""
        return self._blocks is None or self.block(user_key, cohort) in self._blocks

    def _decide_user(self, user_id: str) -> tuple[bytes, bool, bool]:
        """Returns key, held out, and False only if the block is known and not reserved."""
        key = self._hasher.user_key(user_id)
        held = self._by_hash is not None and self._hasher.holds_out_user(
            key, self._by_hash.fraction
        )
        return key, held, self._has_cohorts or self.may_train(key, None)

    def _decide_class(self, label: str, user_key: bytes) -> tuple[int, bool]:
        if self._listed:
            held = label in self._held_classes
        else:
            held = self._by_hash is not None and self._hasher.holds_out_class(
                label, self._by_hash.fraction
            )
        return self._hasher.class_id(label, user_key), held
