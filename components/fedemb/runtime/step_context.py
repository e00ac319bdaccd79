"""What a step is given: configuration, run, stores, keys and ledger, each opened once and lazily.

A pod, a subprocess and a test make the same context and call the same `run(context)`.
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
from fedemb.storage import join, open_store


class Parameters(TypedDict, total=False):
    """Every parameter a step may take; its signature names those it is given."""

    config: RunConfig
    """Configuration of the run; JSON between the steps of a pipeline."""
    public_start: PublicStart
    """The part of the configuration that a cached step is given in its place."""
    run_id: str
    """Name of the run, the idempotency key."""
    private_root: str
    """Store of Raw artifacts: a folder, gs:// or s3://."""
    ledger: str
    """Root of the ledgers."""
    keys: str
    """Key store, apart from the ledger."""
    releases: str
    """Store of releases."""
    beam_options: Sequence[str]
    """Options of the Beam engine, e.g. `--runner=DataflowRunner`; none runs in this process."""


class StepContext:
    """Everything one step works with.

    Args:
      artifacts: paths of its inputs and outputs.
      given: its parameters. Asking for one that was not given raises ConfigError: a step that
        reaches for a store its signature does not name fails here and not in its pod's rights.
    """

    def __init__(self, artifacts: RunArtifacts, **given: Unpack[Parameters]) -> None:
        self.artifacts = artifacts
        self._given = given

    @classmethod
    def of_component(cls, values: Mapping[str, Any]) -> StepContext:
        """Makes the context of a component's arguments, as KFP passes them.

        Args:
          values: name -> text, list, or KFP artifact; what is none of them is left out, so that a
            component may pass its `locals()`.

        Raises:
          ConfigError: parameters of the pipeline are no configuration.
        """
        given: Any = {name: values[name] for name in Parameters.__annotations__ if name in values}
        if "mechanism" in values:  # the parameters of the pipeline, of which `config` is to be made
            given["config"] = run_config(values)
        elif "config" in given:
            given["config"] = RunConfig.as_written(json.loads(given["config"]))
        elif "pretraining" in values:
            given["public_start"] = public_start(values)
        paths = {name: Path(item.path) for name, item in values.items() if hasattr(item, "path")}
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
        """What public pretraining depends on."""
        return self._get("public_start")

    @property
    def run_id(self) -> str:
        """Name of the run."""
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
        """Options of the Beam engine; none runs in this process."""
        return self._given.get("beam_options", ())

    def private(self, *parts: str) -> str:
        """Address of a Raw artifact of this run: `<private_root>/<run_id>/<part>/...`."""
        return join(self.private_root, self.run_id, *parts)

    @cached_property
    def keys(self) -> KeyStore:
        """The key store."""
        return open_key_store(self.keys_uri)

    @cached_property
    def trust(self) -> TrustStore:
        """The keys trusted beside the ledger.

        Raises:
          LedgerError: no ledger was ever made there.
        """
        return read_trust(open_store(self.ledger_uri))

    @cached_property
    def ledger(self) -> Ledger:
        """The policy's ledger, verified, for reading.

        Raises:
          LedgerError: no ledger was ever made there, or it is broken.
        """
        return open_ledger(self.ledger_uri, self.config.policy.policy_id, trust=self.trust)

    @cached_property
    def writable_ledger(self) -> Ledger:
        """The same ledger with the key that signs its records.

        Raises:
          LedgerError: as `ledger`, or the key store is that of another ledger.
        """
        self.ledger.unlock(self.keys)
        return self.ledger
