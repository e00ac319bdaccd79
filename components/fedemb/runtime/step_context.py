"""The context of a step: configuration, run, stores, keys and ledger, opened once and lazily.

A pod, a subprocess and a test create the same context and call the same `run(context)`.

Stores how a step failed, because Kubeflow uploads no output of a failed step.

A failed step writes `outcome.json` and its public outputs next to its output addresses in the
public root. For a denied run, the outputs include the verdict with all reasons. A process that a
later start of the same step superseded writes no outcome. The exit step reads the outcomes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import (
    Any,
    Generic,
    NotRequired,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    runtime_checkable,
)

from fedemb.config import BackboneConfig, RunConfig
from fedemb.config.parameters import backbone_config, run_config
from fedemb.documents.artifacts import Artifact, Public, RunArtifacts
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import ToJson, canonical_json
from fedemb.keys import KeyStore, open_key_store
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.storage import join, open_store

OUTCOME = "outcome.json"


@runtime_checkable
class KfpArtifact(Protocol):
    """Artifact of a component, as KFP passes it."""

    @property
    def path(self) -> str:
        """Local path."""
        ...


class StepFailure(TypedDict):
    """How a step failed."""

    step: str
    error: str
    """Name of the error's class."""
    exit_code: int
    message: str
    fencing_token: NotRequired[int | None]
    kept: NotRequired[list[str]]
    """Outputs that the step wrote before it failed."""


def keep_outcome(
    outputs: Mapping[str, type[Artifact]],
    values: Mapping[str, object],
    outcome: Mapping[str, ToJson],
) -> None:
    """Stores the failure of a step, and the public outputs that the step wrote.

    Args:
      outputs: outputs of the step's declaration.
      values: arguments of the step's component, as KFP passes them; without KFP artifacts, nothing
          is stored.
      outcome: step, error, exit code, message and fencing token, as in the step's log.

    Raises:
      StorageError: the public root cannot be written.
    """
    places: dict[str, list[str]] = {}
    for name, kind in outputs.items():
        value = values.get(name)
        place, _, last = str(getattr(value, "uri", "")).rpartition("/")
        if not place or not isinstance(value, KfpArtifact):
            continue
        store, written = open_store(place), Path(value.path)
        kept = places.setdefault(place, [])
        if issubclass(kind, Public) and written.is_file():
            kept.append(last)
            if store.local_root is None:
                store.write(last, written.read_bytes())
    for place, kept in places.items():
        open_store(place).write(OUTCOME, canonical_json({**outcome, "kept": kept}))


def run_folder(uri: str, task: str) -> str:
    """Returns the folder of all task outputs of a run: the address up to the task name.

    Args:
      uri: address of a task output, `<root>/<pipeline>/<run>/<task>/.../<name>`.
      task: name of the task.
    """
    return uri.rpartition(f"/{task}/")[0]


def outcomes(folder: str, files: Callable[[str], Sequence[str]]) -> Iterator[StepFailure]:
    """Yields the failures of a run's steps that did not succeed in another start.

    If a step failed several times, the failure with the highest fencing token is returned. A step
    succeeded if all of its files are in one folder and were not written by a failed start.

    Args:
      folder: folder of the run.
      files: step -> names of its outputs that are files.

    Raises:
      StorageError: the public root cannot be read.
    """
    store = open_store(folder)
    names = store.list()
    found: dict[str, tuple[int, StepFailure]] = {}
    kept: dict[str, Sequence[str]] = {}
    for name in names:
        if name.endswith(f"/{OUTCOME}"):
            outcome = cast("StepFailure", json.loads(store.read(name)))
            kept[name.removesuffix(f"/{OUTCOME}")] = outcome.get("kept", ())
            token = int(outcome.get("fencing_token") or 0)
            step = str(outcome["step"])
            if step not in found or token >= found[step][0]:
                found[step] = token, outcome
    for step, (_, outcome) in found.items():
        if not _succeeded(names, kept, step.replace("_", "-"), files(step)):
            yield outcome


def _succeeded(
    names: Sequence[str], kept: Mapping[str, Sequence[str]], task: str, files: Sequence[str]
) -> bool:
    """Returns whether some start of a task wrote all files, excluding files of failed starts."""
    places: dict[str, set[str]] = {}
    for name in names:
        if not name.startswith(f"{task}/"):
            continue
        for file in files:
            place, found, _ = f"{name}/".rpartition(f"/{file}/")
            if found:
                places.setdefault(place, set()).add(file)
    return bool(files) and any(
        left >= set(files) and not left <= set(kept.get(place, ()))
        for place, left in places.items()
    )


class Parameters(TypedDict, total=False):
    """All parameters that a step may take; the step's signature selects from them."""

    config: RunConfig
    """Configuration of the run; JSON between the steps of a pipeline."""
    backbone_config: BackboneConfig
    """Part of the configuration that a cached step receives instead of `config`."""
    run_id: str
    """Id of the run, used as the idempotency key."""
    private_root: str
    """Store of Raw artifacts: a folder, gs:// or s3://."""
    ledger: str
    """Root of the ledgers."""
    keys: str
    """Key store, separate from the ledger."""
    releases: str
    """Store of releases."""
    beam_options: Sequence[str]
    """Options of the Beam engine, e.g. `--runner=DataflowRunner`; empty runs in this process."""


T = TypeVar("T")


class _Given(Generic[T]):
    """A parameter of a step. Reading one that its signature does not name raises ConfigError.

    A step that uses a store outside its signature fails here, before its pod's permissions deny it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, context: StepContext, _: type[StepContext]) -> T:
        if self._name not in context.given:
            raise ConfigError(
                f"this step was given no {self._name}; name it in the signature of its component"
            )
        return context.given[self._name]


class StepContext:
    """All inputs of a step: those that its signature names.

    Args:
      artifacts: paths of the step's inputs and outputs.
      given: the step's parameters.
    """

    config = _Given[RunConfig]("config")
    """The frozen configuration of the run."""
    backbone_config = _Given[BackboneConfig]("backbone_config")
    """The part of the configuration that public pretraining depends on."""
    run_id = _Given[str]("run_id")
    """Id of the run."""
    private_root = _Given[str]("private_root")
    """Store of Raw artifacts of all runs."""
    ledger_uri = _Given[str]("ledger")
    """Root of the ledgers."""
    keys_uri = _Given[str]("keys")
    """Address of the key store."""
    releases_uri = _Given[str]("releases")
    """Store of releases."""

    def __init__(self, artifacts: RunArtifacts, **given: Unpack[Parameters]) -> None:
        self.artifacts = artifacts
        self.given: Mapping[str, Any] = {**given}

    @classmethod
    def of_component(cls, values: Mapping[str, object]) -> StepContext:
        """Creates the context from a component's arguments, as KFP passes them.

        Args:
          values: name -> text, list, or KFP artifact; other values are ignored, so that a component
              may pass its `locals()`.

        Raises:
          ConfigError: the parameters of the pipeline are not a valid configuration.
        """
        given: Any = {name: values[name] for name in Parameters.__annotations__ if name in values}
        if "mechanism" in values:  # pipeline parameters, from which `config` is built
            given["config"] = run_config(values)
        elif "config" in given:
            given["config"] = RunConfig.model_validate(json.loads(given["config"]))
        elif "pretraining" in values:
            given["backbone_config"] = backbone_config(values)
        paths = {
            name: Path(item.path) for name, item in values.items() if isinstance(item, KfpArtifact)
        }
        return cls(RunArtifacts(**paths), **given)

    @property
    def beam_options(self) -> Sequence[str]:
        """Options of the Beam engine; empty runs in this process."""
        return self.given.get("beam_options", ())

    def private(self, *parts: str) -> str:
        """Returns a Raw artifact address of this run: `<private_root>/<run_id>/<part>/...`."""
        return join(self.private_root, self.run_id, *parts)

    @cached_property
    def keys(self) -> KeyStore:
        """The key store."""
        return open_key_store(self.keys_uri)

    @cached_property
    def trust(self) -> TrustStore:
        """The trusted keys of the ledger's trust file.

        Raises:
          LedgerError: no ledger was created at this address.
        """
        return read_trust(open_store(self.ledger_uri))

    @cached_property
    def ledger(self) -> Ledger:
        """The policy's ledger, verified and read-only.

        Raises:
          LedgerError: no ledger was created at this address, or it is broken.
        """
        return open_ledger(self.ledger_uri, self.config.policy.policy_id, trust=self.trust)

    @cached_property
    def writable_ledger(self) -> Ledger:
        """The ledger with the key that signs its records.

        Raises:
          LedgerError: as `ledger`, or the key store belongs to another ledger.
        """
        self.ledger.unlock(self.keys)
        return self.ledger
