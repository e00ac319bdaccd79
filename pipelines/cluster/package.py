"""Input of a submission: a compiled pipeline that keeps the rules, and its arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import yaml

from fedemb.config import RunConfig
from fedemb.config.data import BUILTIN
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import Json, JsonObject, file_digest, sha256_hex
from fedemb.foundation.environment import BACKEND
from fedemb.pipelines.cluster.rules import (
    SECRET_VALUES,
    executors_of,
    read_compiled,
    text_at,
    variables_of,
    violations,
)
from fedemb.pipelines.graph import pipeline_arguments
from fedemb.pipelines.steps import PIPELINE

SECRET_OPTION = re.compile(r"--\w*(secret|password|token|access_key)\w*[= ]", re.I)
LONGEST_TEXT = 255
"""Name or description of a run and of a recurring run: VARCHAR(255) in `run_details` and `jobs`."""
LONGEST_VERSION_NAME = 127
LONGEST_EXPERIMENT_NAME = 128
LONGEST_VERSION_TEXT = 65_535
"""Description of a version: a TEXT column."""


def fitted(text: str, longest: int = LONGEST_TEXT) -> str:
    """Returns a text of at most `longest` bytes in UTF-8, and so of at most as many characters.

    Kubeflow creates the Workflow of a run, and only then writes its row. A text that is too long
    for its column gives HTTP 500 while the run continues. A text that is cut ends with the first 8
    digits of the SHA-256 of the whole, so that two long texts with the same prefix stay different.
    """
    data = text.encode()
    if len(data) <= longest:
        return text
    end = f"... [sha256 {sha256_hex(data)[:8]}]"
    return data[: longest - len(end)].decode(errors="ignore").rstrip() + end


def version_name(policy: str, package: Path, key: str = "") -> str:
    """Returns the name of a package as one policy runs it: policy, digest, key of a submission."""
    name = f"{policy} {file_digest(package)[:16]}"
    return fitted(f"{name}-{key}" if key else name, LONGEST_VERSION_NAME)


def as_utc(moment: datetime) -> datetime:
    """A moment in UTC without fractions of a second, as the API keeps it."""
    return moment.astimezone(UTC).replace(microsecond=0)


def check_package(
    package: Path, sha256: str | None = None, config: RunConfig | None = None
) -> None:
    """Checks a compiled pipeline against its pin, the rules of compilation and what it is to run.

    Raises:
      ConfigError: missing, another file, or breaking a rule; the pipeline of another task than the
        configuration's, or its images train on another backend.
    """
    if not package.is_file():
        raise ConfigError(f"package {package.name} is missing; make it with `fedemb compile`")
    if sha256 is not None and (found := file_digest(package)) != sha256:
        raise ConfigError(
            f"package {package.name} has sha256 {found}, the schedule pins {sha256}; review the "
            "difference, then pin the new one"
        )
    try:
        documents = read_compiled(package)
        problems = violations(documents)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"Package {package.name} is not a compiled pipeline. Create it with `fedemb compile`."
        ) from None
    if problems:
        raise ConfigError(
            f"Package {package.name} breaks a rule: {problems[0]}. Compile the package again."
        )
    if config is not None:
        _check_runs(package.name, documents[0], config)


def checked_digest(package: Path, profile: Sequence[str]) -> str:
    """Returns the SHA-256 of a package, which profiles may pin (`packages`).

    The rules of compilation do not see whether the code of a step was changed; the digest does.

    Raises:
      ConfigError: the profile pins other packages.
    """
    from fedemb.pipelines.cluster.compile import load_profile

    found = file_digest(package)
    pinned = load_profile(*profile).packages if profile else ()
    if pinned and found not in pinned:
        raise ConfigError(
            f"package {package.name} has sha256 {found}, which the profile does not list in "
            "`packages`; review the package, then list its digest"
        )
    return found


def _check_runs(name: str, spec: JsonObject, config: RunConfig) -> None:
    """Refuses a package that does not run a configuration: it would charge and then fail."""
    if (found := text_at(spec, "pipelineInfo", "name")) != PIPELINE.name:
        raise ConfigError(f"Package {name} is the pipeline {found}. Run `fedemb compile`.")
    backend = config.training.backend
    for executor in executors_of(spec).values():
        for variable in variables_of(executor):
            only = text_at(variable, "value")
            if variable["name"] == BACKEND and only != backend:
                raise ConfigError(
                    f"the images of package {name} train on {only}, and training.backend is "
                    f"{backend}; set training.backend: {only}, or compile it with the profile of "
                    "the other one"
                )


def run_arguments(
    config: RunConfig, beam_options: tuple[str, ...], mlflow: str | None
) -> dict[str, Json]:
    """Arguments of the pipeline on a cluster, where all four stores must be named.

    Raises:
      ConfigError: a store is missing, and a run without a lasting ledger would have no budget; a
        source is on this machine; or an argument contains a secret, which the API keeps.
    """
    names = ("private_root", "ledger", "keys", "releases")
    stores = {name: getattr(config.storage, name) for name in names}
    if missing := [f"storage.{name}" for name, uri in stores.items() if not uri]:
        raise ConfigError(
            f"{', '.join(missing)} must be set for runs on a cluster; name the stores of `terraform"
            " output storage`"
        )
    public = config.pretraining.source
    sources = {
        "data.source.uri": config.data.source.uri,
        "pretraining.source.uri": public.uri if public else "none",
    }
    for setting, uri in sources.items():
        if uri == BUILTIN or ("://" not in uri and uri != "none" and not uri.startswith("/")):
            raise ConfigError(
                f"{setting}={uri} is on this machine, where no pod can read it; name an object "
                "store, or an absolute path on a mounted volume"
            )
    arguments = pipeline_arguments(config, **stores, beam_options=beam_options)
    if mlflow is not None:
        if not mlflow.startswith(("http://", "https://")):
            raise ConfigError(
                f"mlflow={mlflow} is not an address that a pod can reach. Pass the http(s):// "
                "address of a tracking server."
            )
        arguments["mlflow"] = mlflow
    for name, value in arguments.items():
        if SECRET_VALUES.search(str(value)) or SECRET_OPTION.search(str(value)):
            raise ConfigError(
                f"the argument {name} holds a key or a password, and Kubeflow keeps and shows "
                "arguments; name a secret of the cluster in the profile's `secrets`"
            )
    return arguments
