"""One file with all results of a study, so that the study resumes: a JSON object in each line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemb.errors import ArtifactError


class TableFile:
    """Results by key; a result that is put again replaces the earlier one.

    Args:
      path: the file, made with its folder by the first result.
    """

    def __init__(self, path: Path):
        self.path = path

    def rows(self) -> dict[str, dict[str, Any]]:
        """Reads all results.

        Raises:
          ArtifactError: a line is damaged.
        """
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found: dict[str, dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                found[row.pop("key")] = row
            except (ValueError, KeyError, AttributeError) as error:
                raise ArtifactError(
                    f"line {number} of {self.path.name} is damaged. Remove the line; the study "
                    "runs its row again."
                ) from error
        return found

    def put(self, key: str, row: Mapping[str, Any]) -> None:
        """Appends a result; call it from one process only."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, **row}, sort_keys=True) + "\n")
