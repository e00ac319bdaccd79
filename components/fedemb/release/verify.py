"""Verifies a release bundle: evaluates the gate again from the bundle's content, offline.

Requires the bundle, a trust store from its owner, and optionally the live ledger; no private data
and only public keys. Only the comparison of the SavedModel with `backbone.keras` needs TensorFlow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.evidence import Evidence, gather, sentence_of
from fedemb.documents.ledger_record import ReleaseRecord
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import Identity, ReleaseManifest, VerdictDocument
from fedemb.errors import ArtifactError, FedEmbError, SignatureInvalid
from fedemb.foundation.canonical_json import file_digest, json_object
from fedemb.foundation.document import Written, read
from fedemb.foundation.files import read_regular, write_bytes
from fedemb.keys.trust import TrustStore
from fedemb.ledger import Anchor, Ledger, open_ledger
from fedemb.release import bundle as parts
from fedemb.release.decide import decide, given_approvals
from fedemb.release.model_card import ReleaseEvidence, release_headline, write_card, write_pages
from fedemb.release.rule import Verdict
from fedemb.reports.lineage import FILE_NAME
from fedemb.reports.privacy_text import all_runs, report_sentence

_READER = Path(__file__).parent.parent / "data" / "photos.py"
"""Reader of photos, which every bundle ships; its users execute it."""


@dataclass(frozen=True)
class Verification:
    """The facts and problems found by a verification."""

    problems: tuple[str, ...]
    """One sentence per problem; empty if the bundle is verified."""
    facts: Mapping[str, str]
    """Name, version, run, headline, figures, approvers, guarantee and total privacy loss of all
    runs, as the bundle states them; empty if it cannot be read."""


def verify_release(
    bundle_uri: str, trust_path: Path, ledger_uri: str | None = None, *, rebuild: bool = True
) -> Verification:
    """Verifies a bundle.

    Args:
      bundle_uri: folder of the release; local, gs:// or s3://.
      trust_path: pinned keys, from the owner and not from the bundle.
      ledger_uri: root of the live ledgers, to find later changes; None checks only the copy in the
          bundle.
      rebuild: False skips the comparison of SavedModel, page and lineage with those that are made
          again, which needs TensorFlow and kfp. Their signature and digest are still checked.

    Raises:
      InputError: the address does not contain a release.
      StorageError: the store cannot be reached.
    """
    found = parts.locate(bundle_uri)
    trust = TrustStore.load(trust_path)
    problems: list[str] = []
    facts: dict[str, str] = {}
    try:
        with parts.fetched(found) as bundle:
            problems, facts = _problems(bundle, found, trust, ledger_uri, rebuild=rebuild)
    except (ArtifactError, SignatureInvalid) as error:  # raised while locating the bundle
        problems.append(str(error))
    return Verification(tuple(dict.fromkeys(problems)), facts)


def _problems(
    bundle: Path, found: parts.Located, pinned: TrustStore, ledger_uri: str | None, *, rebuild: bool
) -> tuple[list[str], dict[str, str]]:
    """Returns the problems of a bundle, and its facts. Unsigned content is not parsed."""
    try:
        manifest, copy = parts.check_origin(bundle, pinned)
        trust = copy.chain.trust  # extends the pinned keys by rotations
    except Exception as error:  # any error is a problem
        return [sentence_of(error)], {}
    problems: list[str] = []
    facts: dict[str, str] = {}
    try:
        evidence, report = _read_evidence(bundle)
        verdict = _decide_again(evidence, report, copy)
        problems += [reason.sentence for reason in verdict.reasons]
        if verdict.simulation:
            problems.append("this is a simulation, which is never released")
        facts = _facts(manifest.body, evidence, report, verdict, copy)
        _check_name(manifest, evidence, report)
        parts.check_marker(found, manifest)
        _check_verdict(bundle, manifest.body, report, trust)
        problems += _foreign(bundle, (evidence, report, copy), verdict.waived, pages=rebuild)
    except Exception as error:  # an incomplete check is a problem
        problems.append(sentence_of(error))
    try:
        if rebuild:
            _check_serving(bundle)
        if ledger_uri is not None:
            problems += _live(ledger_uri, copy, pinned, manifest.sha)
    except Exception as error:  # any error is a problem
        problems.append(sentence_of(error))
    return problems, facts


def _facts(
    manifest: ReleaseManifest,
    evidence: Evidence,
    report: Written[PrivacyReport],
    verdict: Verdict,
    ledger: Ledger,
) -> dict[str, str]:
    """Returns the facts of a bundle; waivers and approvals come from its copy of the ledger."""
    body = report.body
    shown = release_headline(evidence, report, verdict.waived, ledger)
    approvals = given_approvals(ledger, body.model_sha, report.sha, body.approve_by)
    by = ", ".join(item.actor for item in approvals)
    return {
        "name": manifest.name,
        "version": manifest.version,
        "run_id": body.run_id,
        "headline": shown.title,
        "figures": shown.figures.sentence(),
        **({"approved_by": by} if by else {}),
        "guarantee": report_sentence(body),
        **({"all_runs": words} if (words := all_runs(body)) else {}),
    }


def _read_evidence(bundle: Path) -> tuple[Evidence, Written[PrivacyReport]]:
    written = json_object(read_regular(bundle / "config.json"), "config.json")
    config = RunConfig.model_validate(written)
    paths = {name: bundle / file for name, file in parts.DOCUMENTS.items()}
    evidence = gather(config, RunArtifacts(**paths, model=bundle))
    return evidence, read(bundle / parts.REPORT, PrivacyReport)


def _check_name(
    manifest: Written[ReleaseManifest], evidence: Evidence, report: Written[PrivacyReport]
) -> None:
    """Checks run and configured name: an old release must not pose as a new one."""
    named, run_id = manifest.body.identity, report.body.run_id
    wanted = Identity(*evidence.config.released_as(run_id), run_id, report.body.attempt)
    if named != wanted:
        raise SignatureInvalid(
            f"The manifest names the bundle {' '.join(map(str, named))}, but its run was to "
            f"release {' '.join(map(str, wanted))}. Fetch the bundle again."
        )


def _check_verdict(
    bundle: Path, manifest: ReleaseManifest, report: Written[PrivacyReport], trust: TrustStore
) -> None:
    """Checks that the signed verdict allows this model with this report under this name."""
    verdict = read(bundle / "verdict.json", VerdictDocument)
    trust.check(verdict, at=report.body.cumulative.ledger_sequence)
    named = (verdict.body.allow, verdict.body.model_sha, verdict.body.report_sha)
    if named != (True, file_digest(bundle / "backbone.keras"), report.sha):
        raise SignatureInvalid(
            "The verdict does not allow this model with this report. Fetch the bundle again."
        )
    allowed_as = (verdict.body.name, verdict.body.version)
    if allowed_as != (manifest.name, manifest.version):
        raise SignatureInvalid(
            "The verdict allows a release of another name or version. Fetch the bundle again."
        )


def _foreign(
    bundle: Path, judged: ReleaseEvidence, waived: Sequence[str], *, pages: bool
) -> Iterator[str]:
    """Yields a sentence for each file that this package does not make of the signed documents."""
    with tempfile.TemporaryDirectory(prefix="fedemb-verify-") as folder:
        again = Path(folder)
        write_card(again, judged, waived)
        if pages:
            event = json_object(read_regular(bundle / FILE_NAME).partition(b"\n")[0], FILE_NAME)
            time = datetime.fromisoformat(str(event["eventTime"]))
            verdict = file_digest(bundle / "verdict.json")
            write_pages(again, judged, verdict=verdict, time=time)
        write_bytes(again / parts.PREPROCESSING, _READER.read_bytes())
        for path in sorted(again.iterdir()):
            if path.read_bytes() != read_regular(bundle / path.name):
                yield (
                    f"{path.name} is not what this version of fedemb makes of the signed documents."
                    " Verify with the version named in README.md"
                )


def _check_serving(bundle: Path) -> None:
    """Checks that the SavedModel is what this code makes of the weights; executes none of it."""
    config = RunConfig.model_validate(
        json_object(read_regular(bundle / "config.json"), "config.json")
    )
    saved = bundle / parts.SAVED_MODEL
    try:
        from fedemb.release.released import ReleasedModel, serving_problem

        problem = serving_problem(saved, bundle / "backbone.keras", config.model)
        if problem is None:
            ReleasedModel(bundle).check_parity()
    except ModuleNotFoundError as error:
        raise SignatureInvalid(
            f"saved_model cannot be checked without {error.name}. Verify with an installation "
            "that has TensorFlow."
        ) from error
    except (OSError, ValueError) as error:
        raise SignatureInvalid("saved_model is not readable. Fetch the bundle again.") from error
    if problem is not None:
        raise SignatureInvalid(problem)


def _decide_again(evidence: Evidence, report: Written[PrivacyReport], copy: Ledger) -> Verdict:
    # The clock rule uses the report's own time, so a bundle does not expire.
    now = datetime.fromisoformat(report.body.time) + timedelta(seconds=1)
    return decide(evidence, report, copy, now=now, same_environment=False)


def _live(ledger_uri: str, copy: Ledger, pinned: TrustStore, bundle_sha: str) -> list[str]:
    """Compares with the live ledger: it must contain the same records, and this release."""
    head = copy.head
    try:
        live = open_ledger(ledger_uri, copy.policy_id, trust=pinned)
        live.verify([Anchor(head.sequence, head.sha, "the bundle")])
    except FedEmbError as error:
        return [str(error)]
    released = {
        record.content(ReleaseRecord).bundle_sha
        for attempt in live.state.attempts.values()
        for record in attempt.releases
    }
    return [] if bundle_sha in released else ["the ledger has no record of this release"]
