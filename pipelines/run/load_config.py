"""From a YAML file or a preset's name, and `--set a.b=c`, to a checked configuration."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from fedemb.config import RunConfig
from fedemb.config.data import BUILTIN
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.files import read_regular, require_folder
from fedemb.foundation.section import CREDENTIALS, NotYaml, parse_yaml

PRESETS = Path(__file__).parent.parent / "configs"
_UNION_TAGS = ("hash", "value")
_DEEPEST = 8
"""Parts of a dotted name."""


def preset_names() -> list[str]:
    """Names of the presets that ship with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def preset_lines() -> list[str]:
    """Names of the presets with the first line of each, which says what it trains."""
    names = preset_names()
    texts = [read_regular(PRESETS / f"{name}.yaml").decode().partition("\n")[0] for name in names]
    width = max(map(len, names))
    return [
        f"{name:<{width}}  {text.lstrip('# ')}" for name, text in zip(names, texts, strict=True)
    ]


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a configuration.

    Args:
      source: path of a YAML file, or the name of a preset.
      overrides: `dotted.key=value`, the value in YAML.

    Raises:
      ConfigError: file missing or not valid YAML, or a value is unknown, out of bounds or
          contradictory.
    """
    path = Path(source)
    if not path.suffix and not path.exists():
        path = PRESETS / f"{source}.yaml"
    try:
        tree = parse_yaml(read_regular(path).decode())
    except FileNotFoundError as error:
        near = difflib.get_close_matches(str(source), preset_names(), n=1)
        hint = f"Did you mean the preset {near[0]}? " if near else ""
        raise ConfigError(
            f"Configuration {source} does not exist. {hint}Pass a YAML file, or one of "
            f"the presets {', '.join(preset_names())}."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"configuration {source} cannot be read: {why}; give a YAML file or a preset"
        ) from error
    except NotYaml as error:
        raise ConfigError(f"{path.name} is {error}; correct it and run again") from error
    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path.name} does not contain sections such as `data:`. Write one with `fedemb init`."
        )
    return _with_overrides(tree, overrides)


def overridden(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Returns the configuration with `dotted.key=value` replaced.

    Raises:
      ConfigError: a value is unknown, out of bounds or contradictory.
    """
    return _with_overrides(config.model_dump(mode="json"), overrides)


def _with_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Validates a tree with `dotted.key=value` replaced.

    Where a setting is text, a value that YAML reads as a number is taken as it was typed:
    `release.version=1.10` is version 1.10 and not 1.1.
    """
    for override in overrides:
        _set(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        wants_text = {
            ".".join(str(part) for part in problem["loc"] if part not in _UNION_TAGS)
            for problem in error.errors()
            if problem["type"] == "string_type" and not isinstance(problem["input"], dict | list)
        }
    for override in overrides:
        dotted, _, text = override.partition("=")
        if dotted in wants_text and text not in ("", "null", "~"):
            _replace(tree, dotted, text)
    return validate(tree)


class PolicyPlaces(NamedTuple):
    """Where the ledger, the keys and the trust file of a policy are; None: not named."""

    ledger: str | None = None
    keys: str | None = None
    trust: Path | None = None

    def in_folder(self, folder: Path | None) -> PolicyPlaces:
        """Returns the places; those that are not named are in the folder of the policy.

        No folder means FEDEMB_POLICY, unless a place is named: the environment never mixes the
        ledger of one policy with the keys of another.
        """
        if folder is None and not any(self) and (named := os.environ.get("FEDEMB_POLICY")):
            folder = Path(named)
        if folder is None:
            return self
        require_folder(root := folder.resolve(), "--policy")
        ledger, keys, trust = (root / name for name in ("ledger", "keys", "ledger/trust.json"))
        return PolicyPlaces(self.ledger or str(ledger), self.keys or str(keys), self.trust or trust)

    def named(self, part: Literal["ledger", "keys", "trust"]) -> str:
        """Returns a place; InputError if it is not named."""
        if place := getattr(self, part):
            return str(place)
        raise InputError(
            f"Pass the folder of the policy with --policy, or its {part} with --{part}."
        )


def with_policy(config: RunConfig, folder: Path | None) -> RunConfig:
    """Returns the configuration with ledger and keys in the folder of a policy, if one is named.

    Raises:
      ConfigError: the configuration names another ledger, which would be a second budget.
    """
    storage = config.storage
    found = PolicyPlaces(storage.ledger, storage.keys).in_folder(folder)
    if folder is not None and Path(found.ledger or "").resolve() != folder.resolve() / "ledger":
        raise ConfigError(
            f"storage.ledger={storage.ledger} and --policy {folder} name two ledgers for the same "
            "users. Remove one of them."
        )
    return updated(config, {"storage.ledger": found.ledger, "storage.keys": found.keys})


def with_data(config: RunConfig, data: str | None) -> RunConfig:
    """Returns the configuration with another private source; unchanged if `data` is None.

    The public source changes too if both come from one file. Glyphs are not a backbone for photos:
    a configuration that would generate them gets no public backbone.
    """
    if data is None:
        return config
    uri = data if "://" in data or data == BUILTIN else str(Path(data).resolve())
    overrides: dict[str, Any] = {"data.source.uri": uri}
    public = config.pretraining.source
    if public is not None and public.uri == config.data.source.uri != BUILTIN:
        overrides["pretraining.source.uri"] = uri
    if public is not None and public.uri == BUILTIN != data:
        overrides["pretraining"] = {"kind": "none"}
    return updated(config, overrides)


def updated(config: RunConfig, overrides: Mapping[str, object]) -> RunConfig:
    """`RunConfig.updated`; every problem becomes a sentence.

    Raises:
      ConfigError: with all problems, one a line.
    """
    try:
        return config.updated(overrides)
    except ValidationError as error:
        raise _config_error(error) from error


def validate(tree: Mapping[str, object]) -> RunConfig:
    """Validates a tree; every problem becomes a sentence.

    Raises:
      ConfigError: with all problems, one a line.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _config_error(error) from error


def _config_error(error: ValidationError) -> ConfigError:
    problems = [_sentence(problem) for problem in error.errors()]
    return ConfigError(*dict.fromkeys(problems))


def _set(tree: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(
            f"--set {override} is not valid. Pass KEY=VALUE, such as --set mechanism.rounds=20."
        )
    try:
        value = parse_yaml(text)
    except NotYaml as error:
        raise ConfigError(
            f"--set {dotted[:80]}: the value {_shortened(text)!r} is {error}; quote it"
        ) from error
    if value == text:  # YAML 1.1 reads 1e-6 as text; what is quoted is meant as text
        with suppress(ValueError):
            value = float(text)
    if dotted.count(".") > _DEEPEST:
        raise ConfigError(f"--set {dotted[:80]}...: no setting lies so deep; see `fedemb config`")
    _replace(tree, dotted, value)


def _replace(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict):
            child = node[parent] = {}
        node = child
    node[leaf] = value


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _sentence(problem: Any) -> str:
    parts = [str(part) for part in problem["loc"] if part not in _UNION_TAGS]
    name = ".".join(parts)
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "extra_forbidden":
        sections = (schema := RunConfig.model_json_schema(), *schema["$defs"].values())
        known = {field: None for section in sections for field in section.get("properties", ())}
        close = difflib.get_close_matches(parts[-1], known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see `fedemb config`"
        return f"{name} is not a setting; {hint}"
    if problem["type"] == "missing":
        return f"{name} is missing; see `fedemb config {parts[0]}`"
    got = problem.get("input")
    plain = isinstance(got, str | int | float | bool | None) and problem["type"] != CREDENTIALS
    plain = plain and not ("://" in str(got) and "@" in str(got))  # may hold a password
    shown = f", got {got!r}" if plain else ""
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{name}: {message}{shown}; see `fedemb config {parts[0]}`"
