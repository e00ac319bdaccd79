"""`fedemb approve`, and `fedemb ledger approvers`: people who decide about a release.

An approver's key is an Ed25519 key of OpenSSH (`ssh-keygen -t ed25519`), which they keep: no key
store and no step holds it. A waiver is signed with the policy owner's key of the key store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedemb.errors import ConfigError, InputError, Refused
from fedemb.foundation.files import read_regular
from fedemb.pipelines.cli.cluster import ClusterOptions, check_cluster_first, connect, objects
from fedemb.pipelines.cli.ledger import Act, ReasonOption, app, reason_text
from fedemb.pipelines.cli.options import PolicyOption, RunsOption, grouped
from fedemb.pipelines.output import escaped, say

if TYPE_CHECKING:
    from fedemb.documents.privacy_report import PrivacyReport
    from fedemb.documents.utility import AnyUtility
    from fedemb.documents.verdict import VerdictDocument
    from fedemb.foundation.document import Written
    from fedemb.keys import KeyStore
    from fedemb.keys.trust import Signer
    from fedemb.ledger import Ledger
    from fedemb.pipelines.cluster.kubeflow import Kubeflow
    from fedemb.pipelines.cluster.waiting import WaitingRun

K = TypeVar("K")


@dataclass(frozen=True)
class Candidate:
    """A run that people decide about."""

    report: Written[PrivacyReport]
    utility: Written[AnyUtility] | None
    verdict: Written[VerdictDocument] | None
    """Verdict of the gate about the report; None: not decided yet."""
    ledger: str
    """Root of the ledgers."""
    rollback_anchor: str | None


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """Options of a waiver, which the policy owner signs."""

    waive: Annotated[
        str | None,
        typer.Option(help="Code of a gate rule to waive for this model, instead of an approval."),
    ] = None
    policy: PolicyOption = None
    keys: Annotated[
        str | None, typer.Option("--keys", help="Key store of the policy owner, for --waive.")
    ] = None
    reason: ReasonOption = ""


@grouped
def approve(
    *,
    run: Annotated[
        Path,
        typer.Argument(help="Run directory or name, or with --host the id of a run in Kubeflow."),
    ],
    key: Annotated[
        Path | None, typer.Option(help="Private key of the approver, in OpenSSH format, Ed25519.")
    ] = None,
    waiver: Waiver,
    runs: RunsOption = Path("runs"),
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    cluster: ClusterOptions,
    package: Annotated[
        Path | None,
        typer.Option(help="YAML of `fedemb compile`; default: the one that the run started with."),
    ] = None,
) -> None:
    """Approve the release of a run, or waive one gate rule for its model, in a signed record.

    Shows the figures and what the gate will decide after the signature. A run that the gate
    refuses for another reason is not approved. With --host, the last approval also starts the run
    that releases.

    Example: fedemb approve RUN_ID --key ada --host https://kubeflow.example/pipeline
    """
    if (key is None) == (waiver.waive is None):
        raise InputError("Pass --key to approve, or --waive with --policy and --reason.")
    if cluster.host and not run.exists() and not (runs / run).exists():
        kubeflow, waiting = waiting_run(str(run), cluster, package)
        if waiting.released:
            say(f"run {waiting.released} released this model; nothing was signed or started")
            return
        anchor = waiting.config.storage.rollback_anchor
        candidate = Candidate(
            waiting.report, waiting.utility, waiting.verdict, waiting.ledger, anchor
        )
        if decide(candidate, key, waiver, yes=yes):
            start_release(kubeflow, waiting, cluster, package)
        return
    decide(local_candidate(run, runs), key, waiver, yes=yes)


def local_candidate(run: Path, runs: Path) -> Candidate:
    """Returns the run of a directory or a name.

    Raises:
      InputError: no such run, or it has no privacy report.
    """
    from fedemb.pipelines.run.directory import (
        RunDirectory,
        signed_report,
        signed_utility,
        signed_verdict,
    )

    found = RunDirectory.open(run, runs)
    report = signed_report(found)
    if report is None:
        raise InputError(f"run {found.run_id} has no privacy report yet; let it finish first")
    ledger, anchor = found.stores()["ledger"], found.config().storage.rollback_anchor
    return Candidate(report, signed_utility(found), signed_verdict(found), ledger, anchor)


def decide(candidate: Candidate, key: Path | None, waiver: Waiver, *, yes: bool) -> bool:
    """Shows a run, asks, and records the decision; returns whether all approvals are given.

    Raises:
      InputError: the ledger or the key is not known.
      Refused: the signature would change nothing, or the person does not agree.
      LedgerError: the ledger is broken, or older than its rollback anchor.
    """
    from fedemb.documents.verdict import NOT_APPROVED
    from fedemb.keys import open_key_store
    from fedemb.keys.trust import Signer
    from fedemb.ledger import Reservation
    from fedemb.pipelines.run.load_config import PolicyPlaces

    report, body, code = candidate.report, candidate.report.body, waiver.waive
    keys = PolicyPlaces(keys=waiver.keys).in_folder(waiver.policy).keys
    reason, key_store = "", open_key_store(keys) if keys else None
    if code is not None:
        reason = reason_text(waiver.reason)
        require_waivable(code)
        if key_store is None:
            raise InputError("A waiver is signed by the policy owner. Pass --policy or --keys.")
    opened = _opened(candidate, key_store)
    attempt = opened.state.attempts.get((body.run_id, body.attempt))
    if attempt is None:
        raise Refused(
            f"the ledger of policy {opened.policy_id!r} has no run {body.run_id!r} attempt "
            f"{body.attempt}; restore the ledger that the run was reserved in"
        )
    say(*_shown(candidate))
    if key is not None:
        signer = _signer(key)
        say(_after_signature(opened, candidate, signer))
    else:
        assert key_store is not None  # a waiver
        signer = Signer.current(key_store, "policy", opened.chain.trust)
        say(f"waives {code} for model {body.model_sha[:12]}: {reason}")
    if not yes and not typer.confirm("You have read its pages, and sign?"):
        raise Refused("Not signed; nothing was written. Run the command again to sign.")
    record = opened.decide(
        Reservation.of(attempt.reserve.document),
        code=code or NOT_APPROVED,
        model_sha=body.model_sha,
        report_sha=None if code else report.sha,
        reason=reason,
        signer=signer,
    )
    if code is not None:
        say(f"{code} is waived for this model by record {record.sequence}")
        return False
    given, needed = _approvals(opened, report), opened.terms.approvals
    say(
        f"approved by {record.actor} as record {record.sequence}; {given} of {needed} required "
        "approvals"
    )
    return given >= needed


def require_waivable(code: str) -> None:
    """Refuses to waive a rule that is not a matter of judgement.

    Raises:
      Refused: no such rule, or it protects arithmetic or integrity.
    """
    from fedemb.release.decide import WAIVABLE

    if code not in WAIVABLE:
        raise Refused(
            f"{code!r} cannot be waived: it protects arithmetic or integrity, or the gate has no "
            f"such rule. Pass one of {', '.join(WAIVABLE)}."
        )


def _opened(candidate: Candidate, keys: KeyStore | None) -> Ledger:
    """Returns the ledger of a run, compared with its rollback anchor and with the documents."""
    from fedemb.ledger import check_high_water, find_rollback_anchor, open_ledger, read_trust
    from fedemb.storage import open_store

    report, verdict, anchor = candidate.report, candidate.verdict, candidate.rollback_anchor
    trust, cumulative = read_trust(open_store(candidate.ledger)), report.body.cumulative
    opened = open_ledger(candidate.ledger, cumulative.policy_id, trust=trust)
    for document in (report, verdict):
        if document is not None:
            opened.chain.trust.check(document, at=cumulative.ledger_sequence)
    check_high_water(opened, keys, find_rollback_anchor(opened, [anchor] if anchor else []))
    return opened


def _approvals(opened: Ledger, report: Written[PrivacyReport]) -> int:
    """Returns the number of people who approved a report by its deadline."""
    body = report.body
    return len(opened.state.approvals_of(body.model_sha, report.sha, body.approve_by))


def _shown(candidate: Candidate) -> Iterator[str]:
    """Yields what a person reads before signing: guarantee, terms, figures and waivers."""
    from fedemb.reports.headline import Figures
    from fedemb.reports.privacy_text import all_runs, guarantee_sentence
    from fedemb.reports.report import signer_name
    from fedemb.reports.utility_text import floors_sentence

    body, utility = candidate.report.body, candidate.utility
    yield f"run {body.run_id}, report {candidate.report.sha[:12]}, made at {body.time}"
    yield f"guarantee: {guarantee_sentence(body.guarantee)}"
    if together := all_runs(body):
        yield f"  {together}"
    if deadline := body.approve_by:
        yield f"approvals count until {deadline:%Y-%m-%d %H:%M} UTC"
    if terms := body.release:
        yield f"release: {terms.name} {terms.version}"
        yield floors_sentence(terms.min_gain_over_public, terms.no_worse_than)
    for row in Figures.of(body, utility and utility.body).rows():
        yield f"{row.label}: {row.value}" + (f", {row.note}" if row.note else "")
    for item in candidate.verdict.body.waivers if candidate.verdict else ():
        yield f"waived by {signer_name(item.actor)}: {item.code}, {item.reason}"


def _after_signature(opened: Ledger, candidate: Candidate, signer: Signer) -> str:
    """Returns the decision of the gate after an approval.

    Raises:
      Refused: the approval changes nothing: the policy needs none, the gate denies the run for
        another reason or has not decided, or the deadline has passed.
    """
    from fedemb.documents.verdict import NOT_APPROVED

    report, body, verdict = candidate.report, candidate.report.body, candidate.verdict
    needed = opened.terms.approvals
    if not needed:
        raise Refused(
            f"Policy {opened.policy_id!r} releases without approvals, permanently. Set "
            "policy.approvals before the first run of a new policy."
        )
    if body.approve_by is not None and datetime.now(UTC) > body.approve_by:
        raise Refused(
            f"The approvals of run {body.run_id} were due by {body.approve_by:%Y-%m-%d %H:%M} UTC, "
            "so this one does not count. Nothing was written. Resume the run from account_privacy "
            "for another deadline; nothing is trained again."
        )
    if verdict is None or verdict.body.report_sha != report.sha:
        raise Refused(
            f"The gate has not decided about report {report.sha[:12]} of run {body.run_id}. "
            "Nothing was written. Resume the run from gate_release."
        )
    if codes := [code for code in verdict.body.reasons if code != NOT_APPROVED]:
        raise Refused(
            f"run {body.run_id} stays refused, with or without approvals: {', '.join(codes)}; "
            "nothing was written"
        )
    before = opened.state.approvals_of(body.model_sha, report.sha)
    given = len({record.signature["key_id"] for record in before} | {signer.key_id})
    if given < needed:
        return f"after your signature: still waiting, {given} of {needed} approvals"
    waived = " with a waiver" if verdict.body.waivers else ""
    return f"after your signature: the gate allows the release{waived}"


def waiting_run(
    run_id: str, cluster: ClusterOptions, package: Path | None
) -> tuple[Kubeflow, WaitingRun]:
    """Reads a run in Kubeflow that waits for a decision, before anything is signed.

    Raises:
      ConfigError: the profile pins packages, and none was passed.
      InputError: the run has no privacy report.
      StorageError: Kubeflow or the public root cannot be read.
    """
    from fedemb.pipelines.cluster.compile import load_profile
    from fedemb.pipelines.cluster.package import check_package, checked_digest
    from fedemb.pipelines.cluster.waiting import read_waiting

    kubeflow = connect(cluster)
    found = objects(kubeflow.namespace)
    waiting = read_waiting(kubeflow, found, run_id)
    if package is not None:
        check_package(package, config=waiting.config)
        checked_digest(package, cluster.profile or ())
    elif cluster.profile and load_profile(*cluster.profile).packages:
        raise ConfigError(
            "The profile pins packages, and Kubeflow returns a package with other bytes. Pass "
            "the file with --package."
        )
    return kubeflow, waiting


def start_release(
    kubeflow: Kubeflow, waiting: WaitingRun, cluster: ClusterOptions, package: Path | None
) -> None:
    """Starts the run that decides again at the gate, and releases.

    Raises:
      Refused: the cluster is unsafe.
      StorageError: Kubeflow does not answer or refuses; the approval is recorded.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = package or waiting.stored.write_package(Path(folder))
        check_cluster_first(kubeflow.namespace, cluster.profile, [waiting.config])
        run = waiting.release(kubeflow, objects(kubeflow.namespace), package)
    again = "decides again from gate_release, without training"
    say(f"release: run {run.run_id} {again if run.started else f'is already {run.state}'}")


@app.command()
@grouped
def approvers(
    *,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=FILE",
            help="Public key of an approver; repeatable; default: print the approvers.",
        ),
    ] = None,
    act: Act,
) -> None:
    """Set the people who may approve releases. For the policy owner.

    Example: fedemb ledger approvers anna=anna.pub ben=ben.pub --policy policy --reason
    "release managers"
    """
    from fedemb.ledger import name_approvers

    opened, key_store = act.open()
    if not named:
        for public, name in opened.state.approvers.items():
            say(f"{name}  {public}")
        return
    if not opened.terms.approvals:
        raise Refused(
            f"Policy {opened.policy_id!r} releases without approvals, permanently. Add "
            "approvers to a policy with policy.approvals above 0."
        )
    people: dict[str, str] = {}
    for entry in named:
        name, _, path = entry.partition("=")
        if not path or name.strip() != name or not name or name in people:
            raise InputError(
                f"{entry!r} is not NAME=PUBLIC_KEY_FILE with a new name. Pass, for example, "
                "ada=ada.pub."
            )
        people[name] = _public_key(Path(path).expanduser())
    record = name_approvers(opened, people, reason_text(act.reason), key_store, act.rollback_anchor)
    say(f"record {record.sequence}: only {', '.join(people)} may approve")


def _signer(path: Path) -> Signer:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    from fedemb.keys.trust import Signer

    def load(data: bytes) -> object:
        try:
            return load_ssh_private_key(data, None)
        except TypeError:  # it is encrypted
            word = typer.prompt(escaped(f"Passphrase of {path}"), hide_input=True)
            return load_ssh_private_key(data, word.encode())

    return Signer.of_approver(_key(path, load, Ed25519PrivateKey))


def _public_key(path: Path) -> str:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    return _key(path, load_ssh_public_key, Ed25519PublicKey).public_bytes_raw().hex()


def _key(path: Path, load: Callable[[bytes], object], kind: type[K]) -> K:
    """Returns a key of OpenSSH of one kind."""
    from cryptography.exceptions import UnsupportedAlgorithm

    wrong = f"{path} is not a readable OpenSSH key of the kind {kind.__name__}"
    try:
        found = load(read_regular(path.expanduser()))
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{wrong} ({error}). Make one with `ssh-keygen -t ed25519`.") from error
    if not isinstance(found, kind):
        raise InputError(f"{wrong}. Make one with `ssh-keygen -t ed25519`.")
    return found
