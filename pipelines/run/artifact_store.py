"""`fedemb run --artifact-store URI`: where the things of a run lie, and publishing them.

    URI/public/<run>/<step>/<output>   Public and Noised outputs, copied here as steps finish; then
    URI/public/<run>/run.json          configuration, durations and digests; comes last, and only
                                       what it lists counts
    URI/private/<run>/                 Raw artifacts, written by the steps themselves
    URI/ledger/  URI/releases/         the lasting ledger; bundles, each made visible by a marker

No store contains keys: a reader of the store must not be able to sign or to undo a hash. The
steps declare what may be published, output by output; anything else in the run directory stays
there.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import combinations
from pathlib import Path

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.config.digest import config_digest
from fedemb.documents.artifacts import Artifact, Noised, require_publishable
from fedemb.errors import ConfigError, LedgerError
from fedemb.foundation.canonical_json import JsonFields, canonical_json, json_digest
from fedemb.foundation.digests import file_digest
from fedemb.ledger.root import TRUST_NAME
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.run.local import Status, View
from fedemb.pipelines.steps import pipeline_of
from fedemb.storage import join, open_store

SCHEMA = "fedemb/published_run/2"
"""Version 2 adds the configuration, as in a bundle, the durations and the class of an error."""
MANIFEST = "run.json"


def store_overrides(uri: str | None, keys: str | None) -> list[str]:
    """Overrides of the section `storage` for `--artifact-store` and `--keys`."""
    places = {} if uri is None else {
        "public_root": join(uri, "public"),
        "private_root": join(uri, "private"),
        "deletion_marks": join(uri, "private", "policy", "deletion_marks"),
        "ledger": join(uri, "ledger"),
        "releases": join(uri, "releases"),
    }  # fmt: skip
    if keys is not None:
        places["keys"] = keys if "://" in keys else str(Path(keys).expanduser().resolve())
    return [f"storage.{name}={place}" for name, place in places.items()]


def check_stores(config: RunConfig, config_name: str, runs: Path) -> None:
    """Refuses stores that would mix what must stay apart, or a bucket without a ledger.

    `config_name` is shown in the command of the message. Raw artifacts are below `runs` unless the
    configuration moves them.

    Raises:
      ConfigError: keys beside the ledger, Raw beside public artifacts, or a lasting ledger without
        lasting keys.
      LedgerError: the remote ledger was never made.
      StorageError: the store of the ledger cannot be reached.
    """
    storage = config.storage
    if storage.ledger is not None and storage.keys is None:
        raise ConfigError(
            f"the ledger {storage.ledger} lasts, so its keys must last too, and elsewhere; name a "
            "folder or Secret Manager with --keys (or storage.keys), the same for every run"
        )
    places = {
        f"storage.{name}": place
        for name in ("public_root", "private_root", "ledger", "keys", "releases")
        if (place := getattr(storage, name)) is not None
    }
    pairs = [
        (first, second)
        for first, second in combinations(places, 2)
        if {first, second} & {"storage.private_root", "storage.keys"}
    ]
    if storage.private_root is None and storage.public_root is not None:
        places["--runs"] = str(runs)
        pairs.append(("storage.public_root", "--runs"))
    for first, second in pairs:
        if _nested(places[first], places[second]):
            raise ConfigError(
                f"{first}={places[first]} and {second}={places[second]} lie one inside the "
                "other; private and public data, and keys and what they protect, must be apart: "
                "name another place"
            )
    if storage.ledger is not None:
        store = open_store(storage.ledger)
        if store.local_root is None and not store.exists(TRUST_NAME):
            raise LedgerError(
                f"No ledger in {store.uri}. Check the address. For a new ledger run `fedemb "
                f"ledger init --config {config_name} --ledger {store.uri} --keys "
                f"{storage.keys}` with the --set options of this run, then run again."
            )


def _nested(first: str, second: str) -> bool:
    one, other = (
        f"{(place if '://' in place else Path(place).expanduser().resolve().as_uri())}".rstrip("/")
        for place in (first, second)
    )
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


class PublishingView:
    """A view that also publishes what a finished step wrote."""

    def __init__(self, view: View, publisher: Publisher):
        self._view, self._publisher = view, publisher

    def show(self, status: Status, step: str, text: str = "") -> None:
        """See View."""
        self._view.show(status, step, text)
        if status == "finished":
            self._publisher.step_finished(step)


class Publisher:
    """Copies the publishable outputs of a run to the public root, while it runs and at its end.

    Everything may be repeated: what is there already is not sent again. While steps run a failure
    is kept quiet; `finish` tries all again and reports it.
    """

    def __init__(self, run: RunDirectory, public_root: str):
        self._run = run
        self._outputs = pipeline_of(run.config()).published()
        # The model of a simulation has the noise of a larger population, or none.
        self._left_out = (Noised,) if run.config().purpose == "simulation" else ()
        self._store = open_store(join(public_root, run.run_id))
        self._pool = ThreadPoolExecutor(1)
        self._sent: list[Future[None]] = []
        self.uri = self._store.uri

    def step_finished(self, step: str) -> None:
        """Sends the outputs of a step, without waiting for it."""
        if step in self._outputs:
            self._sent.append(self._pool.submit(self._send_step, step))

    def finish(self, state: RunState, progress: Callable[[int, int], None]) -> int:
        """Sends what is not there yet, then the manifest; returns how many artifacts are published.

        `progress` is called with artifacts done and artifacts in all.

        Raises:
          StorageError: the store cannot be written; the manifest is not, so nothing of this counts.
        """
        self._pool.shutdown(wait=True)
        found = [artifact for step in self._outputs for artifact in self._of_step(step)]
        rows: list[JsonFields] = []
        for done, (step, name, artifact) in enumerate(found, start=1):
            digest, kind = self._send(step, name, artifact), type(artifact)
            rows.append({"step": step, "name": name, "kind": kind.__name__, "sha256": digest})
            progress(done, len(found))
        config = self._run.config()
        body = {
            "schema": SCHEMA,
            "run_id": self._run.run_id,
            "config_sha": config_digest(config, *FREE_SECTIONS),
            # Addresses of the stores are internal, and no digest of the run binds them.
            "config": {**config.model_dump(mode="json"), "storage": {}},
            "exit_code": state.exit_code,
            "failed_step": state.failed_step,
            "error": state.error,
            "seconds": state.seconds,
            "artifacts": rows,
        }
        self._store.write(MANIFEST, canonical_json(body))
        return len(rows)

    def _of_step(self, step: str) -> list[tuple[str, str, Artifact]]:
        """Step, name and artifact of what a step has written and may publish."""
        return [
            (step, name, kind(path))
            for name, kind in self._outputs[step].items()
            if not issubclass(kind, self._left_out)
            and (path := self._run.output(name, step)) is not None
            and path.exists()
        ]

    def _send_step(self, step: str) -> None:
        for found in self._of_step(step):
            self._send(*found)

    def _send(self, step: str, name: str, artifact: Artifact) -> str:
        """Sends one artifact and returns its digest: of its bytes, or of all files of a folder."""
        require_publishable(artifact)
        target, path = f"{step}/{name}", artifact.path
        if path.is_dir():
            return json_digest(self._store.upload_tree(path, target))
        digest = file_digest(path)
        if self._store.digest(target) != digest:
            self._store.write(target, path.read_bytes())
        return digest
