"""`fedemb approve`, and `fedemb ledger approvers`: people who must agree before a model goes out.

An approver's key is an Ed25519 key of OpenSSH (`ssh-keygen -t ed25519`), which they keep: no key
store and no step holds it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedemb.errors import InputError, Refused
from fedemb.foundation.files import read_regular
from fedemb.pipelines.cli.ledger_commands.approval import (
    Candidate,
    Judged,
    after_signature,
    judge_run,
    judge_verdict,
    require_allowed,
    require_in_time,
    terms_shown,
)
from fedemb.pipelines.cli.ledger_commands.ledger_write import (
    KeysOption,
    LedgerOption,
    PolicyOption,
    ReasonOption,
    RollbackAnchorOption,
    open_for_people,
    reason_text,
)
from fedemb.pipelines.cli.ledger_commands.on_cluster import (
    Release,
    candidate_of,
    start_release,
    waiting_run,
)
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.cli.options import RunsOption
from fedemb.pipelines.cli.schedule import ClusterOptions
from fedemb.pipelines.output import escaped, say

if TYPE_CHECKING:
    from fedemb.documents.privacy_report import PrivacyReport
    from fedemb.foundation.document import Written
    from fedemb.keys.signatures import Signer
    from fedemb.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Options that say where the run and its ledger are."""

    ledger: Annotated[
        str | None, typer.Option("--ledger", help="Root of the ledgers; default: the run's own.")
    ] = None
    rollback_anchor: RollbackAnchorOption = None
    verdict: Annotated[
        Path | None,
        typer.Option(help="Signed verdict of the gate, with a report; default: not evaluated."),
    ] = None
    runs: RunsOption = Path("runs")


@grouped
def approve(
    *,
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory or name, privacy report (JSON), or with --host the id of a run in "
            "Kubeflow."
        ),
    ],
    key: Annotated[
        Path, typer.Option(help="Private key of the approver, in OpenSSH format, Ed25519.")
    ],
    evidence: Evidence,
    yes: Annotated[bool, typer.Option("--yes", help="Skip the confirmation.")] = False,
    cluster: ClusterOptions,
    release: Release,
) -> None:
    """Approve the release of a run with a signed ledger record.

    Shows the figures and what the gate will decide after the signature. A run that the gate
    refuses for another reason is not approved. With --host, the last approval also starts the run
    that releases.

    If the policy has a rollback anchor, the ledger is compared with it (--rollback-anchor; default:
    the run's own). A report that is written again has another digest and needs new approvals.

    Example: fedemb approve RUN_ID --key ada --host https://kubeflow.example/pipeline
    """
    if cluster.host and not run.exists() and not (evidence.runs / run).exists():
        kubeflow, waiting = waiting_run(str(run), cluster, release)
        if sign(candidate_of(waiting), key, evidence, yes=yes):
            start_release(kubeflow, waiting, cluster, release)
        return
    sign(local_candidate(run, evidence), key, evidence, yes=yes)


def local_candidate(run: Path, evidence: Evidence) -> Candidate:
    """Returns the run of a directory, a name or a privacy report.

    Raises:
      InputError: no such run, or it has no privacy report.
    """
    from fedemb.documents.privacy_report import PrivacyReport
    from fedemb.foundation.document import read
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.pipelines.run.signed import signed_report, signed_utility

    if run.is_file():
        report = read(run, PrivacyReport)
        return Candidate(report, None, None, None, lambda opened: _judged(evidence, report, opened))
    directory = RunDirectory.named(run, evidence.runs)
    found = signed_report(directory)
    if found is None:
        raise InputError(f"run {directory.run_id} has no privacy report yet; let it finish first")

    def judge(opened: Ledger) -> Judged:
        return _judged(evidence, found, opened) or judge_run(directory, found, opened)

    anchor = directory.config().storage.rollback_anchor
    return Candidate(found, signed_utility(directory), directory.stores()["ledger"], anchor, judge)


def _judged(evidence: Evidence, report: Written[PrivacyReport], opened: Ledger) -> Judged | None:
    """Returns what the gate said, if the approver passed its verdict."""
    if evidence.verdict is None:
        return None
    from fedemb.documents.verdict import VerdictDocument
    from fedemb.foundation.document import read

    return judge_verdict(read(evidence.verdict, VerdictDocument), report, opened)


def sign(candidate: Candidate, key: Path, evidence: Evidence, *, yes: bool) -> bool:
    """Shows a run, asks, and records the approval; returns whether all approvals are given.

    Raises:
      InputError: the ledger or the key is not known.
      Refused: the signature would change nothing, or the person does not agree.
      LedgerError: the ledger is broken, or older than its rollback anchor.
    """
    from fedemb.ledger import Reservation

    report, signer = candidate.report, _signer(key)
    body, opened = report.body, _opened(candidate, evidence)
    attempt = opened.state.attempts.get((body.run_id, body.attempt))
    if attempt is None:
        raise Refused(
            f"the ledger of policy {opened.policy_id!r} has no run {body.run_id!r} attempt "
            f"{body.attempt}; name the ledger the run was reserved in"
        )
    if not opened.terms.approvals:
        raise Refused(
            f"Policy {opened.policy_id!r} releases without approvals, permanently. Set "
            "policy.approvals before the first run of a new policy."
        )
    _say_report(report)
    judged = candidate.judge(opened)
    for line in terms_shown(report, candidate.utility, judged):
        say(line)
    require_allowed(judged, body.run_id)
    require_in_time(body)
    before = opened.state.approvals_of(body.model_sha, report.sha)
    who = {item.signature["key_id"] for item in before} | {signer.key_id}
    say(after_signature(judged, len(who), opened.terms.approvals))
    if not yes and not typer.confirm("You have read its pages, and approve the release?"):
        raise Refused("Not approved; nothing was written. Run the command again to approve.")
    record = opened.approve(
        Reservation.of(attempt.reserve.document),
        model_sha=body.model_sha,
        report_sha=report.sha,
        signer=signer,
    )
    given = opened.state.approvals_of(body.model_sha, report.sha, body.approve_by)
    say(
        f"approved by {record.actor} as record {record.sequence}; {len(given)} of "
        f"{opened.terms.approvals} required approvals"
    )
    return len(given) >= opened.terms.approvals


def _opened(candidate: Candidate, evidence: Evidence) -> Ledger:
    """Returns the ledger of a run, compared with its rollback anchor and with its report."""
    from fedemb.ledger import check_high_water, find_rollback_anchor, open_ledger, read_trust
    from fedemb.storage import open_store

    report = candidate.report
    root = evidence.ledger or candidate.ledger
    if root is None:
        raise InputError("A privacy report does not say where its ledger is. Pass --ledger.")
    anchor = evidence.rollback_anchor or candidate.rollback_anchor
    trust = read_trust(open_store(root))
    opened = open_ledger(root, report.body.cumulative.policy_id, trust=trust)
    opened.chain.trust.check(report, at=report.body.cumulative.ledger_sequence)
    check_high_water(opened, None, find_rollback_anchor(opened, [anchor] if anchor else []))
    return opened


def _say_report(report: Written[PrivacyReport]) -> None:
    from fedemb.reports.privacy_report_words import all_runs, guarantee_sentence
    from fedemb.reports.utility_words import floors_sentence

    body = report.body
    say(f"run {body.run_id}, report {report.sha[:12]}, made at {body.time}")
    say(f"guarantee: {guarantee_sentence(body.guarantee)}")
    if together := all_runs(body):
        say(f"  {together}")
    if deadline := body.approve_by:
        say(f"approvals count until {deadline:%Y-%m-%d %H:%M} UTC")
    if body.release and body.release.name:
        say(f"release: {body.release.name} {body.release.version}")
    if terms := body.release:  # reports before version 4 do not have the terms
        say(floors_sentence(terms.min_gain_over_public, terms.no_worse_than))


def approvers(
    named: Annotated[
        list[str] | None,
        typer.Argument(help="NAME=PUBLIC_KEY_FILE; repeatable; default: print the approvers."),
    ] = None,
    *,
    ledger: LedgerOption,
    keys: KeysOption,
    reason: ReasonOption = "",
    policy: PolicyOption = None,
    rollback_anchor: RollbackAnchorOption = None,
) -> None:
    """Set the people who may approve releases. For the policy owner.

    Example: fedemb ledger approvers anna=anna.pub ben=ben.pub --ledger policy/ledger --keys
    policy/keys --reason "release managers"
    """
    from fedemb.ledger import name_approvers

    opened, key_store = open_for_people(ledger, keys, policy, rollback_anchor)
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
    record = name_approvers(opened, people, reason_text(reason), key_store, rollback_anchor)
    say(f"record {record.sequence}: only {', '.join(people)} may approve")


def _signer(path: Path) -> Signer:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    from fedemb.keys.signatures import Signer

    wrong = f"{path} is not a readable OpenSSH private key of type Ed25519"
    try:
        data = read_regular(path.expanduser())
        try:
            private = load_ssh_private_key(data, None)
        except TypeError:  # it is encrypted
            word = typer.prompt(escaped(f"Passphrase of {path}"), hide_input=True)
            private = load_ssh_private_key(data, word.encode())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{wrong} ({error}); make one with ssh-keygen -t ed25519") from error
    if not isinstance(private, Ed25519PrivateKey):
        raise InputError(f"{wrong}; make one with ssh-keygen -t ed25519")
    return Signer.of_approver(private)


def _public_key(path: Path) -> str:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        public = load_ssh_public_key(read_regular(path))
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(
            f"{path} is not an OpenSSH public key ({error}). Pass the .pub file."
        ) from error
    if not isinstance(public, Ed25519PublicKey):
        raise InputError(f"{path} is not an Ed25519 key. Create one with `ssh-keygen -t ed25519`.")
    return public.public_bytes_raw().hex()
