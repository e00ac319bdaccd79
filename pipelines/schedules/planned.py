"""The runs that schedules start, as `watch_budget` and `fedemb budget` forecast them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fedemb.pipelines.schedules.load import read_schedules
from fedemb.steps.watch_budget.forecast import PlannedRuns


def planned_runs(folder: Path) -> list[PlannedRuns]:
    """Returns the enabled schedules of a folder; compiled packages are not needed.

    Raises:
      ConfigError: a file is not a valid schedule, or the folder has no file.
    """
    return [
        PlannedRuns(
            name=item.schedule.name,
            config=item.config,
            times=tuple(int(slot.timestamp()) for slot in item.schedule.slots),
        )
        for item in read_schedules(folder)
        if item.schedule.enabled
    ]


def planned_text(schedules: Sequence[PlannedRuns]) -> str:
    """Returns schedules as the parameter `schedules`, which `parse_planned` reads."""
    fields = {item.name: item.model_dump(mode="json", exclude={"name"}) for item in schedules}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
