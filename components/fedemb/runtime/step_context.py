"""The context of a step: configuration, run, stores, keys and ledger, opened once and lazily.

A pod, a subprocess and a test create the same context and call the same `run(context)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from fedemb.config import PublicStart, RunConfig
from fedemb.config.parameters import public_start, run_config
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import ConfigError
from fedemb.keys import KeyStore, open_key_store
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.runtime.outcome import KfpArtifact
from fedemb.storage import join, open_store


class Parameters(TypedDict, total=False):
    """All parameters that a step may take; the step's signature selects from them."""

    config: RunConfig
    """Configuration of the run; JSON between the steps of a pipeline."""
    public_start: PublicStart
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
    public_start = _Given[PublicStart]("public_start")
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
            given["public_start"] = public_start(values)
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
