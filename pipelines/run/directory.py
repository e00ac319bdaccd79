"""Where a local run keeps its things: public and private apart, nothing shared by accident.

Documents of a run that its steps signed; other files in its public folder are not shown.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import TypeAdapter

from fedemb.config import RunConfig
from fedemb.documents.audit import AuditReport
from fedemb.documents.plan import PrivacyPlan, read_plan
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import AnyUtility, utility_kind
from fedemb.documents.verdict import VerdictDocument
from fedemb.errors import ArtifactError, FedEmbError, InputError, StorageError
from fedemb.foundation.canonical_json import JsonObject, ToJson
from fedemb.foundation.document import Document, Written, read
from fedemb.foundation.files import create_bytes, read_regular, write_bytes, write_error
from fedemb.foundation.section import parse_yaml
from fedemb.ledger import Ledger, open_ledger, read_trust
from fedemb.storage import open_store

T = TypeVar("T")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass
class RunState:
    """How a run stands; None or empty: not known yet."""

    exit_code: int | None = None
    failed_step: str | None = None
    error: str | None = None
    """Name of the error's class."""
    message: str | None = None
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Step -> seconds that it took, of finished steps."""
    closing_lines: list[str] = field(default_factory=list[str])


_STATE, _WORDS = TypeAdapter(RunState), TypeAdapter(tuple[str, ...])


def checked_run_id(run_id: str | None) -> str:
    """The name of a run; one from time and chance where None is given.

    Raises:
      InputError: it cannot be part of a folder's name and of an address.
    """
    if run_id is not None and not _NAME.fullmatch(run_id):
        raise InputError(
            f"--run-id {run_id!r} is not valid. Use at most 100 letters, digits, dots, dashes "
            "and underscores, with a letter or digit first."
        )
    return run_id or time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)


@dataclass(frozen=True)
class RunDirectory:
    """One run on this machine.

    `private/` (mode 0700) holds everything Raw; `public/` what the steps hand each other;
    `policy/` the ledger and keys, unless the configuration names lasting ones.
    """

    root: Path

    @property
    def run_id(self) -> str:
        """The idempotency key: the name of the directory."""
        return self.root.name

    @property
    def private(self) -> Path:
        """Raw root."""
        return self.root / "private"

    @property
    def public(self) -> Path:
        """Pipeline root of kfp."""
        return self.root / "public"

    @property
    def reports(self) -> Path:
        """HTML pages and JSON reports, collected at the end."""
        return self.root / "reports"

    @property
    def log(self) -> Path:
        """Everything the steps printed."""
        return self.root / "run.log"

    @property
    def index(self) -> Path:
        """The page to open first."""
        return self.root / "index.html"

    @property
    def named(self) -> str:
        """The directory as a command from the current folder names it."""
        here = Path.cwd()
        place = self.root.relative_to(here) if self.root.is_relative_to(here) else self.root
        return shlex.quote(str(place))

    @property
    def resumed_by(self) -> str:
        """Command that resumes the run from the current folder."""
        return f"fedemb run --resume {self.named}"

    @classmethod
    def create(cls, parent: Path, run_id: str | None, config: RunConfig) -> RunDirectory:
        """Makes the directory and freezes the configuration in it.

        Raises:
          InputError: a run of this name exists, or the path cannot be one of a folder.
          StorageError: the folder cannot be made: no space, or no permission.
        """
        run = cls((parent / checked_run_id(run_id)).resolve())
        try:
            run.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = "the run directory cannot be made; name another folder with --runs"
            raise write_error(what, run.root, error) from error
        try:
            create_bytes(run.root / "config.yaml", _yaml(config))
        except FileExistsError as error:
            raise InputError(
                f"Run {run.run_id} exists. Resume it with `{run.resumed_by}`, or pass another "
                "--run-id."
            ) from error
        run.private.mkdir(mode=0o700, exist_ok=True)
        for folder in (run.public, run.reports):
            folder.mkdir(exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path, parent: Path = Path()) -> RunDirectory:
        """Opens an existing run: its directory, or its name below the folder of all runs.

        Raises:
          InputError: neither has a run.
        """
        run = cls((path if path.exists() else parent / path).resolve())
        if inside := sorted(path.glob("*/config.yaml")):
            raise InputError(f"{path} is a folder of runs; name one, such as {inside[0].parent}")
        if not (run.root / "config.yaml").is_file():
            raise InputError(
                f"No run at {path}, and none of this name in {parent}. Use a name that `fedemb "
                f"runs --runs {shlex.quote(str(parent))}` lists."
            )
        return run

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While entered, no other process runs this run; where the file system has locks.

        Raises:
          InputError: another process does; nothing has been changed.
        """
        try:
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a read-only folder fails at the first write
            yield
            return
        try:
            with suppress(OSError):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise InputError(
                        f"run {self.run_id} is running already, in another `fedemb run`; nothing "
                        "was changed: wait for its end, or stop it by Ctrl-C there, then resume it"
                    ) from error
            yield
        finally:
            os.close(descriptor)

    def is_running(self) -> bool:
        """Whether a process runs this run now; False where the file system has no locks."""
        try:
            descriptor = os.open(self.root / ".lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def config(self) -> RunConfig:
        """The frozen configuration.

        Raises:
          ArtifactError: it was changed or cut and is no longer a valid configuration.
        """
        return self._own("config.yaml", lambda text: RunConfig.model_validate(parse_yaml(text)))

    def change_config(self, config: RunConfig) -> None:
        """Freezes another configuration, and keeps the one before as `config.<n>.yaml`."""
        path = self.root / "config.yaml"
        number = len(list(self.root.glob("config.*.yaml"))) + 1
        create_bytes(self.root / f"config.{number}.yaml", path.read_bytes())
        write_bytes(path, _yaml(config))

    def beam_options(self) -> tuple[str, ...]:
        """Options of the engine that partitions the users; nothing that comes out depends on them.

        They are not in the configuration, so a run may resume with another engine.
        """
        return self._own("beam_options.json", _WORDS.validate_json, ())

    def set_beam_options(self, options: Sequence[str]) -> None:
        """Replaces the options of the engine."""
        self._write("beam_options.json", list(options))

    def stores(self, config: RunConfig | None = None) -> dict[str, str]:
        """URIs of the four stores: private_root, ledger, keys, releases."""
        storage = (config or self.config()).storage
        return {
            "private_root": storage.private_root or str(self.private),
            "ledger": storage.ledger or str(self.root / "policy" / "ledger"),
            "keys": storage.keys or str(self.root / "policy" / "keys"),
            "releases": storage.releases or str(self.root / "releases"),
        }

    def output(self, name: str, step: str = "*") -> Path | None:
        """Newest output of this name, or None if no step has written it yet.

        Kfp puts outputs into `<pipeline>-<time>/<component>/<output>` below its root.
        """
        pattern = f"*/{step.replace('_', '-')}/{name}"
        found = sorted(self.public.glob(pattern), key=lambda path: path.stat().st_mtime)
        return found[-1] if found else None

    def document(self, name: str) -> JsonObject | None:
        """The newest JSON output of this name, or None."""
        path = self.output(name)
        if path is None or not path.is_file():
            return None
        try:
            return json.loads(read_regular(path))
        except ValueError as error:
            raise ArtifactError(
                f"output {name} is not JSON; run the step that writes it again"
            ) from error

    def write_state(self, state: RunState) -> None:
        """Records how the run stands, for `fedemb runs` and the index."""
        self._write("state.json", asdict(state))

    def read_state(self) -> RunState:
        """What `write_state` wrote last; empty before."""
        return self._own("state.json", _STATE.validate_json, RunState())

    def _write(self, name: str, value: ToJson) -> None:
        write_bytes(self.root / name, json.dumps(value, indent=1, sort_keys=True).encode())

    def _own(self, name: str, parse: Callable[[str], T], absent: T | None = None) -> T:
        """One of our own files; says in a sentence that it was broken since."""
        if absent is not None and not (self.root / name).exists():
            return absent
        try:
            return parse(read_regular(self.root / name).decode())
        except (ValueError, RecursionError) as error:  # no text, no YAML or JSON, no configuration
            raise ArtifactError(
                f"{name} of run {self.run_id} was changed or cut after it was written, or is of "
                "another version; restore it from a backup, or start a run with a new id"
            ) from error
        except OSError as error:
            raise StorageError(
                f"{name} of run {self.run_id} cannot be read: {error.strerror}; fix permissions"
            ) from error


def _yaml(config: RunConfig) -> bytes:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode()


D = TypeVar("D", bound=Document)


def readable(read: Callable[[], T]) -> T | None:
    """Returns a document, or None if it is missing, broken or not signed as it must be."""
    try:
        return read()
    except FedEmbError:
        return None


def ledger_of(run: RunDirectory, config: RunConfig | None = None) -> Ledger:
    """The ledger a run was reserved in, or the one that another configuration names.

    Raises:
      LedgerError: it is missing or broken.
    """
    store = open_store(run.stores(config)["ledger"])
    return open_ledger(store.uri, run.config().policy.policy_id, trust=read_trust(store))


def signed_plan(run: RunDirectory) -> PrivacyPlan | None:
    """The newest plan of a run; None if it has none yet.

    Until something is reserved in a ledger of the run's own, no key counts yet: it is then made of
    the configuration again.

    Raises:
      ArtifactError: the file is not a plan.
      PlanMismatch: it is that of another configuration.
      SignatureInvalid: plan_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    if run.output("privacy_plan") is None:
        return None
    plan = signed_plan_document(run)
    if plan is None:
        from fedemb.release.plan import document

        return document(run.config())
    return plan.body


def signed_plan_document(run: RunDirectory) -> Written[PrivacyPlan] | None:
    """The newest plan of a run; None: no plan, or no ledger that says whose keys count.

    Raises:
      ArtifactError: as `signed_plan`, like the other errors.
    """
    path = run.output("privacy_plan")
    if path is None or not open_store(run.stores()["ledger"]).exists("trust.json"):
        return None
    _, plan = read_plan(path, run.config())
    ledger = ledger_of(run)
    key = (run.run_id, ledger.state.last_attempt(run.run_id))
    at = ledger.state.attempts[key].reserve.sequence if key in ledger.state.attempts else None
    ledger.chain.trust.check(plan, at=at)
    return plan


def signed_report(run: RunDirectory) -> Written[PrivacyReport] | None:
    """The newest privacy report of a run; None if it has none yet.

    Raises:
      ArtifactError: the file is not a privacy report, or one of another run.
      SignatureInvalid: account_privacy did not sign it.
      LedgerError: the ledger that says whose keys count is missing or broken.
    """
    return _signed(run, "privacy_report", PrivacyReport)


def signed_audit(run: RunDirectory) -> Written[AuditReport] | None:
    """The newest audit report of a run, signed by its audit; else as `signed_report`."""
    return _signed(run, "audit_report", AuditReport)


def signed_utility(run: RunDirectory) -> Written[AnyUtility] | None:
    """The newest utility report of a run, signed by its evaluation; else as `signed_report`."""
    return _signed(run, "utility_report", utility_kind(run.config().task))


def signed_verdict(run: RunDirectory) -> Written[VerdictDocument] | None:
    """The newest verdict on the privacy report of a run, signed by its gate.

    None: no verdict, one about an earlier report, or one whose signature cannot be checked. A
    verdict that is not shown only makes a run look less finished.
    """
    verdict = readable(lambda: _signed(run, "verdict", VerdictDocument))
    report = readable(lambda: signed_report(run))
    if verdict is None or report is None or verdict.body.report_sha != report.sha:
        return None
    return verdict


def _signed(run: RunDirectory, output: str, kind: type[D]) -> Written[D] | None:
    """The newest document of a run; an empty file is that of a step that ended before it wrote.

    The key counted when the privacy report was made; now, if no report exists.
    """
    path = run.output(output)
    if path is None or not path.is_file() or not path.stat().st_size:
        return None
    document = read(path, kind)
    report = document if isinstance(document.body, PrivacyReport) else signed_report(run)
    body = report and report.body
    known = body.cumulative.ledger_sequence if isinstance(body, PrivacyReport) else None
    ledger = ledger_of(run)
    ledger.chain.trust.check(document, at=ledger.head.sequence if known is None else known)
    if getattr(document.body, "run_id", run.run_id) != run.run_id:
        raise ArtifactError(
            f"The newest {document.body.kind} in the folder of run {run.run_id} belongs to "
            "another run. Check who may write to the public folder."
        )
    return document
