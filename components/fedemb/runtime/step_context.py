"""The context of a step: configuration, run, stores, keys and ledger, opened once and lazily.

A pod, a subprocess and a test create the same context and call the same `run(context)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, Unpack

from fedemb.config import PublicStart, RunConfig
from fedemb.config.parameters import public_start, run_config
from fedemb.documents.run_artifacts import RunArtifacts
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


class StepContext:
    """All inputs of a step.

    Args:
      artifacts: paths of the step's inputs and outputs.
      given: the step's parameters. Access to a missing parameter raises ConfigError, so a step that
          uses a store outside its signature fails here, before the permissions of its pod deny it.
    """

    def __init__(self, artifacts: RunArtifacts, **given: Unpack[Parameters]) -> None:
        self.artifacts = artifacts
        self._given = given

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

    def _get(self, name: str) -> Any:
        if name not in self._given:
            raise ConfigError(
                f"this step was given no {name}; name it in the signature of its component"
            )
        return self._given[name]

    @property
    def config(self) -> RunConfig:
        """The frozen configuration of the run."""
        return self._get("config")

    @property
    def public_start(self) -> PublicStart:
        """The part of the configuration that public pretraining depends on."""
        return self._get("public_start")

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self._get("run_id")

    @property
    def private_root(self) -> str:
        """Store of Raw artifacts of all runs."""
        return self._get("private_root")

    @property
    def ledger_uri(self) -> str:
        """Root of the ledgers."""
        return self._get("ledger")

    @property
    def keys_uri(self) -> str:
        """Address of the key store."""
        return self._get("keys")

    @property
    def releases_uri(self) -> str:
        """Store of releases."""
        return self._get("releases")

    @property
    def beam_options(self) -> Sequence[str]:
        """Options of the Beam engine; empty runs in this process."""
        return self._given.get("beam_options", ())

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
