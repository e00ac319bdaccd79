"""Verifies again, builds the signed bundle and publishes it by exclusive create.

A release becomes visible with its marker `<name>/<version>.json`, created exclusively after the
whole bundle is stored. The ledger's release record follows; lineage and registries are updated
after it. A process killed before the marker publishes nothing; run again, it completes the release
and reuses finished parts.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kfp import dsl

from fedemb.documents.artifacts import Noised, Public, RunArtifacts
from fedemb.documents.evidence import MODEL_FILES, Evidence, read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.verdict import Identity, VerdictDocument
from fedemb.errors import FedEmbError, GateDenied, Refused, SignatureInvalid
from fedemb.foundation.canonical_json import JsonObject, file_digest, tree_digests
from fedemb.foundation.document import Written, read
from fedemb.foundation.files import write_bytes
from fedemb.keys.trust import Signer
from fedemb.ledger import Ledger, read_reservation
from fedemb.models.keras_backend import load_keras
from fedemb.release import bundle as parts
from fedemb.release.bundle import Marker
from fedemb.release.decide import applied_waivers, decide
from fedemb.release.model_card import write_card, write_pages
from fedemb.release.registries import Release, register
from fedemb.reports.lineage import FILE_NAME, send
from fedemb.runtime.step import Rights, step
from fedemb.runtime.step_context import StepContext
from fedemb.storage import join, local_tree, open_store


@step(
    image="cpu",
    private=False,
    resources="serve",
    outputs={"release": Public},
    rights=Rights(ledger="append", signing=("ledger", "release"), releases="create"),
)
def release_model(
    config: str,
    ledger: str,
    keys: str,
    releases: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    privacy_report: dsl.Input[dsl.Artifact],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    verdict: dsl.Input[dsl.Artifact],
    release: dsl.Output[dsl.Artifact],
):
    """Verifies again, then publishes the signed bundle by exclusive create."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.release_model import run

    with step_process("release_model", locals()) as context:
        published = run(context)
        release.metadata.update(
            published_at=published.get("uri", ""), bundle_sha=published.get("bundle_sha", "")
        )


_log = logging.getLogger(__name__)


def run(context: StepContext) -> JsonObject:
    """Publishes the model of an allowed run and copies its marker to the artifact `release`.

    `pretrained` is the whitelist of the model's tensors.

    Returns:
      The marker, address and digest (`uri`, `bundle_sha`) of the bundle; empty in a simulation.

    Raises:
      GateDenied: the verdict, or the re-evaluated rules, deny.
      Refused: the version is taken by another model, a tensor does not belong to the backbone, or
          the bundle has other files than `fedemb verify` requires.
    """
    config, artifacts = context.config, context.artifacts
    if config.purpose == "simulation":
        write_bytes(artifacts.release, b"{}")
        return {}
    ledger = context.writable_ledger
    evidence = read_evidence(config, artifacts)
    report = read(artifacts.privacy_report, PrivacyReport)
    reservation = read_reservation(artifacts.reservation)
    name, version = config.released_as(reservation.run_id)
    verdict = _allowed(evidence, ledger, artifacts.verdict, report, (name, version))
    start = _start_of(artifacts, evidence)
    identity = Identity(name, version, reservation.run_id, reservation.attempt)
    model_sha, trust = evidence.model.body.weights_sha, ledger.chain.trust
    marker = Marker(open_store(context.releases_uri), trust, identity, model_sha)
    published = marker.read()
    if published is None:
        load_keras()
        with tempfile.TemporaryDirectory(prefix="fedemb-release-") as folder:
            tree = Path(folder, "bundle")
            _copy_artifacts(artifacts, tree)
            _require_judged(tree, evidence, report, verdict)
            _complete(tree, evidence, report, ledger, verdict.body.waived, start=start)
            signer = Signer.current(context.keys, "release", trust)
            parts.write_manifest(tree, identity, signer)
            _require_seal(tree, ledger)
            published = marker.publish(tree)
    ledger.release(
        reservation,
        model_sha=model_sha,
        report_sha=published.body.files[parts.REPORT],
        bundle_sha=published.sha,
        name=name,
        version=version,
    )
    store = open_store(context.releases_uri)
    uri = join(store.uri, parts.tree_of(store, published))
    _log.info("released %s %s at %s", name, version, uri)
    # Uses the published bundle of any process; a repeated run sends it again.
    send(lambda: open_store(uri).read(FILE_NAME))
    write_bytes(artifacts.release, published.data)
    _tell(uri, config.storage.registries)
    return {**published.json, "uri": uri, "bundle_sha": published.sha}


def _start_of(artifacts: RunArtifacts, evidence: Evidence) -> Path:
    """Returns the file of the public backbone; raises Refused if training started elsewhere."""
    start = artifacts.pretrained / "backbone.keras"
    if file_digest(start) != evidence.model.body.initial_weights_sha:
        raise Refused(
            "The public backbone is not the one that training started from. Use artifacts of "
            "one run only."
        )
    return start


def _copy_artifacts(artifacts: RunArtifacts, tree: Path) -> None:
    """Copies documents and model of the run into the bundle."""
    for name, file in parts.DOCUMENTS.items():
        parts.place(Public(getattr(artifacts, name)), tree, file)
    for name in sorted(MODEL_FILES):
        parts.place(Noised(artifacts.model / name), tree, name)


def _tell(uri: str, registries: Sequence[str]) -> None:
    """Announces a published release; errors are warnings, because the release stays valid."""
    problems: dict[str, str] = {}
    try:
        if registries:
            with local_tree(uri) as tree:
                release = Release.of(tree, uri)
            problems = {address: register(release, address) for address in registries}
    except FedEmbError as error:
        problems = dict.fromkeys(registries, str(error))
    for address, problem in problems.items():
        if problem:
            _log.warning(
                "the release is published, but was not made known to %s (%s); run `fedemb register "
                "%s --to %s` when it answers",
                *(address, problem, uri, address),
            )


def _allowed(
    evidence: Evidence,
    ledger: Ledger,
    verdict_path: Path,
    report: Written[PrivacyReport],
    released_as: tuple[str, str],
) -> Written[VerdictDocument]:
    """Returns the verdict, after checking that it and the re-evaluated rules allow this model."""
    verdict = read(verdict_path, VerdictDocument)
    ledger.chain.trust.check(verdict, at=report.body.cumulative.ledger_sequence)
    named = (verdict.body.model_sha, verdict.body.report_sha)
    if not verdict.body.allow or named != (evidence.model.body.weights_sha, report.sha):
        raise GateDenied(
            "the verdict does not allow this model with this report; run gate_release on them"
        )
    allowed_as = (verdict.body.name, verdict.body.version)
    if allowed_as != released_as:
        raise GateDenied(
            f"the verdict does not allow the release {' '.join(released_as)}; run account_privacy "
            "and gate_release with this release.name and release.version"
        )
    again = decide(evidence, report, ledger)
    if not again.allow:
        reasons = "; ".join(f"{reason.sentence}; {reason.remedy}" for reason in again.reasons)
        raise GateDenied(
            f"The gate denies the release just before it is published: {reasons}. See `fedemb "
            "ledger show`."
        )
    if verdict.body.waivers != applied_waivers(ledger, again.waived, report.body):
        raise GateDenied(
            "the waivers that the verdict names are not those of the ledger; run gate_release again"
        )
    return verdict


def _require_judged(
    tree: Path,
    evidence: Evidence,
    report: Written[PrivacyReport],
    verdict: Written[VerdictDocument],
) -> None:
    """Rejects copies that differ from the evaluated files: the stores were read twice."""
    documents = (*evidence.signed, evidence.reservation, report, verdict)
    judged = {document.sha for document in documents} | set(evidence.model_files.values())
    for name, digest in tree_digests(tree).items():
        if digest not in judged:
            raise Refused(
                f"{name} changed after the gate read it, so nothing is published. Check who "
                "may write to the artifacts of this run, then release again."
            )


def _require_seal(tree: Path, ledger: Ledger) -> None:
    """Rejects a bundle that `fedemb verify` would find incomplete, before it is published."""
    try:
        parts.check_bundle(tree, ledger.chain.trust)
    except SignatureInvalid as error:
        raise Refused(
            f"Nothing is published, because the release would not verify: {error}. Release "
            "again from an installation with the versions in requirements/."
        ) from error


def _complete(
    tree: Path,
    evidence: Evidence,
    report: Written[PrivacyReport],
    ledger: Ledger,
    waived: Sequence[str],
    *,
    start: Path,
) -> None:
    """Adds files created at release: serving model, card, ledger copy, lineage."""
    from fedemb.release.released import load_whitelisted, save_for_users, serving_problem

    config, file = evidence.config, tree / "backbone.keras"
    save_for_users(load_whitelisted(file, start, config.model), config, tree)
    problem = serving_problem(tree / parts.SAVED_MODEL, file, config.model)
    if problem is not None:
        raise Refused(f"The model is not published: {problem}. Train and evaluate the model again.")
    # The complete ledger: it leads from the pinned keys to the keys that sign this bundle.
    records = [ledger.chain.store.read(record.name) for record in ledger.chain.records]
    write_bytes(tree / "ledger.jsonl", b"".join(record + b"\n" for record in records))
    write_card(tree, (evidence, report, ledger), waived)
    write_pages(tree, (evidence, report, ledger), verdict=file_digest(tree / "verdict.json"))
