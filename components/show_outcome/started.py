"""How a run was started: its id, configuration and options, as far as they are valid."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedemb.config import RunConfig
from fedemb.config.parameters import OPTIONAL_STORES, run_config
from fedemb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Started:
    """Parameters of a run. Without any, only its outputs are known."""

    run_id: str = ""
    """Id in the ledger, which a resumed run has from the first one; empty: not known."""
    config: RunConfig | None = None
    """None: the parameters are not a valid configuration. Stores are left out."""
    mlflow: str = ""
    """Address of a tracking server; empty: none."""
    reused: Mapping[str, str] = field(default_factory=dict)
    """Output -> its address in an earlier run, for a run that was resumed from a step."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Started:
        """Reads the parameters of the step; a value that is not valid is left out."""
        try:
            config = run_config({**values, **dict.fromkeys(OPTIONAL_STORES, "")})
        except ConfigError:
            config = None
        try:
            reused = {
                str(name): str(uri) for name, uri in json.loads(str(values["reused"])).items()
            }
        except (ValueError, AttributeError):
            reused = {}
        return cls(
            run_id=str(values["run_id"]),
            config=config,
            mlflow=str(values["mlflow"]).strip(),
            reused=reused,
        )
