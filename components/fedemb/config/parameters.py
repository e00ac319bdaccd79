"""Pipeline parameters: a configuration split into the parts that people set and compare.

Each part is one parameter. A section is passed as JSON text, because kfp structs turn 32 into 32.0
and drop null. Null is a valid value: `release.min_gain_over_public: null` disables the floor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from fedemb.config.policy import StorageConfig
from fedemb.config.run import BackboneConfig, RunConfig
from fedemb.config.training import TrainingConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json, JsonObject
from fedemb.foundation.section import Section

T = TypeVar("T", bound=Section)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a pipeline."""

    type: type
    description: str
    default: Json = None
    """Default value; None: the parameter is required."""


PLAIN = ("purpose", "task")
SECTIONS = (
    *("policy", "mechanism", "data", "partition", "model", "pretraining", "training"),
    *("tuning", "evaluation", "audit", "release"),
)
STORES = ("private_root", "ledger", "keys", "releases")
"""Required stores. Each is passed only to the steps with rights to it, not in their
configuration."""
OPTIONAL_STORES = ("rollback_anchor",)
"""Optional stores; empty means not used."""


def _parameters() -> dict[str, Parameter]:
    fields = RunConfig.model_fields
    found: dict[str, Parameter] = {}
    for name in (*PLAIN, *SECTIONS):
        field = fields[name]
        words = field.description or (getattr(field.annotation, "__doc__", None) or "")
        if name in SECTIONS:
            words += " JSON; `fedemb config SECTION` names its settings."
        default = None if field.is_required() else _text(field.default, name)
        found[name] = Parameter(str, " ".join(words.split()), default)
    seed = TrainingConfig.model_fields["seed"]
    found["seed"] = Parameter(int, seed.description or "", seed.default)
    for name in (*STORES, *OPTIONAL_STORES):
        words = " ".join((StorageConfig.model_fields[name].description or "").split())
        words = words.replace("; null:", "; empty:")
        found[name] = Parameter(str, words, "" if name in OPTIONAL_STORES else None)
    found["ledger"] = Parameter(str, "The lasting privacy ledger: what was spent.")
    options = "Options of the Beam engine, e.g. --runner=DataflowRunner; none runs in the step."
    found["beam_options"] = Parameter(list, options, [])
    words = "Tracking server of MLflow that receives the ended run, http(s)://; empty: none."
    found["mlflow"] = Parameter(str, words, "")
    return found


def _text(value: Section | str, name: str) -> str:
    if not isinstance(value, Section):
        return value
    left_out = {"seed"} if name == "training" else None
    return value.model_dump_json(exclude=left_out)


def parameters_of(config: RunConfig) -> dict[str, str | int]:
    """Returns the pipeline parameters for a configuration, without the required stores."""
    return {
        **{name: _text(getattr(config, name), name) for name in (*PLAIN, *SECTIONS)},
        "seed": config.training.seed,
        **{name: getattr(config.storage, name) or "" for name in OPTIONAL_STORES},
    }


def run_config(values: Mapping[str, object]) -> RunConfig:
    """Returns the configuration of pipeline parameters; inverse of `parameters_of`, less stores.

    Args:
      values: name -> value of all parameters.

    Raises:
      ConfigError: a section is not valid JSON, or the sections are not a valid configuration.
    """
    sections = {name: _json(values[name], name) for name in SECTIONS}
    training = {**sections["training"], "seed": values["seed"]}
    stores = {name: values[name] or None for name in OPTIONAL_STORES}
    storage = {**StorageConfig().model_dump(mode="json"), **stores}
    plain = {name: values[name] for name in PLAIN}
    return _checked(RunConfig, {**plain, **sections, "training": training, "storage": storage})


def backbone_config(values: Mapping[str, object]) -> BackboneConfig:
    """Returns the configuration of the public backbone from pipeline parameters.

    Args:
      values: with `model`, `pretraining` and `seed`.

    Raises:
      ConfigError: as `run_config`.
    """
    sections = {name: _json(values[name], name) for name in ("model", "pretraining")}
    return _checked(BackboneConfig, {**sections, "seed": values["seed"]})


def _json(text: object, name: str) -> JsonObject:
    try:
        value: Json = json.loads(str(text))
    except ValueError as error:
        raise ConfigError(
            f"Parameter {name} is not valid JSON ({error}). Pass a JSON object of settings, "
            "see `fedemb config all`."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"Parameter {name} must be a JSON object, got {str(text)[:40]!r}. Pass the settings of "
            "`fedemb config all`."
        )
    return value


def _checked(kind: type[T], tree: Mapping[str, object]) -> T:
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        said = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"The parameters are not valid: {where}{': ' * bool(where)}{said}. Correct the "
            "parameters; see `fedemb config all`."
        ) from error


PARAMETERS = _parameters()
"""Name -> parameter, in the order in which the user interface lists them."""
OF_STEPS = {
    **{name: item.description for name, item in PARAMETERS.items()},
    "config": "The configuration of the run, as the plan was made of it; JSON.",
    "run_id": "Name of the run, the idempotency key: on a cluster the id of the job.",
    "status": "How the run ended, from Kubeflow.",
    "reused": "Addresses of outputs that a resumed run takes from earlier runs, as JSON by output.",
}
"""Name -> description of step inputs that are not artifacts."""
