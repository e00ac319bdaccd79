"""Is a bundle what it says it is? Decides again from what is inside, offline.

Needs the bundle, a trust store from its owner, and at best the live ledger; no private data, and of
the keys only public halves. TensorFlow is used, where it is installed, to look into the SavedModel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from fedemb.config import RunConfig
from fedemb.documents.artifacts import file_digest, json_digest, read_json, tree_digests
from fedemb.documents.evidence import Document, Evidence, read_document, read_rounds, sentence_of
from fedemb.documents.model_files import stored_tensors
from fedemb.errors import ArtifactError, FedEmbError, SignatureInvalid
from fedemb.gate.decide import decide
from fedemb.keys.trust import TrustStore, verify_document
from fedemb.ledger.chain import Chain
from fedemb.ledger.ledger import Anchor, Ledger, open_ledger
from fedemb.reports.privacy_report_words import all_runs
from fedemb.steps.release_model import bundle as parts
from fedemb.steps.release_model.marker import bundle_address
from fedemb.storage import LocalStore, local_tree


@dataclass(frozen=True)
class Verification:
    """What was looked at, and what is wrong with it."""

    problems: tuple[str, ...]
    """A sentence each; empty if the bundle is verified."""
    facts: Mapping[str, str]
    """Name, version, run, guarantee and what all runs cost, as the bundle states them; empty if it
    cannot be read."""


def verify_bundle(bundle_uri: str, trust_path: Path, ledger_uri: str | None = None) -> list[str]:
    """Verifies a bundle; see `verify_release`.

    Returns:
      What is wrong, a sentence each; empty if the bundle is verified.
    """
    return list(verify_release(bundle_uri, trust_path, ledger_uri).problems)


def verify_release(
    bundle_uri: str, trust_path: Path, ledger_uri: str | None = None
) -> Verification:
    """Verifies a bundle.

    Args:
      bundle_uri: folder of the release; local, gs:// or s3://.
      trust_path: pinned keys, from the owner and not from the bundle.
      ledger_uri: root of the live ledgers, to find what happened since; None looks at the copy
        inside only.

    Raises:
      InputError: there is no release at the address.
      StorageError: the store cannot be reached.
    """
    address, marked = bundle_address(bundle_uri)
    trust = TrustStore.load(trust_path)
    problems: list[str] = []
    facts: dict[str, str] = {}
    try:
        with local_tree(address) as bundle:
            problems += _problems(bundle, trust, ledger_uri, marked)
            with suppress(Exception):  # what cannot be read is among the problems
                facts = _facts(bundle)
    except ArtifactError as error:  # found on the way here
        problems.append(str(error))
    return Verification(tuple(dict.fromkeys(problems)), facts)


def _problems(
    bundle: Path, pinned: TrustStore, ledger_uri: str | None, marked: str | None
) -> list[str]:
    problems: list[str] = []
    copy, trust = None, pinned
    try:
        copy = _ledger_copy(bundle, pinned)
        trust = copy.chain.trust  # leads on from the pinned keys, where they were rotated
    except Exception as error:  # fails closed
        problems.append(f"the ledger inside the bundle does not hold: {sentence_of(error)}")
    checks: list[Callable[[], Any]] = [
        lambda: parts.check_signature(bundle, trust),
        lambda: check_files(bundle),
        lambda: _check_name(bundle, marked),
        lambda: _check_attestation(bundle, trust),
        lambda: _check_serving(bundle),
    ]
    for check in checks:
        try:
            check()
        except Exception as error:  # fails closed: what cannot be checked is wrong
            problems.append(sentence_of(error))
    if copy is None:
        return problems
    try:
        problems += _decide_again(bundle, copy)
        if ledger_uri is not None:
            problems += _live(ledger_uri, copy, pinned, bundle)
    except Exception as error:  # fails closed
        problems.append(sentence_of(error))
    return problems


def _facts(bundle: Path) -> dict[str, str]:
    manifest = read_json(bundle / parts.MANIFEST, parts.MANIFEST_SCHEMA)
    report = read_document(bundle / parts.DOCUMENTS["report"], "report").body
    return {
        "name": str(manifest["name"]),
        "version": str(manifest["version"]),
        "run_id": str(report["run_id"]),
        "guarantee": str(report["guarantee"]["sentence"]),
        **({"all_runs": words} if (words := all_runs(report)) else {}),
    }


def check_files(bundle: Path) -> None:
    """A bundle has all its files, no other, and each as its manifest says.

    Raises:
      SignatureInvalid: and which file.
      ArtifactError: there is no manifest that can be read.
    """
    found = tree_digests(bundle)
    allowed = {*parts.FILES, *(f"{parts.SAVED_MODEL}/{name}" for name in parts.SAVED_MODEL_FILES)}
    if set(found) != allowed:
        odd = sorted(set(found) ^ allowed)
        raise SignatureInvalid(f"the bundle has extra or missing files: {', '.join(odd[:5])}")
    manifest = read_json(bundle / parts.MANIFEST, parts.MANIFEST_SCHEMA)
    late = {parts.MANIFEST, parts.SIGNATURE, "attestation.json"}
    for name in sorted(allowed - late):
        if manifest["files"].get(name) != found[name]:
            raise SignatureInvalid(f"{name} is not what the manifest says; fetch the bundle again")
    if set(manifest["files"]) != allowed - late:
        raise SignatureInvalid("the manifest names other files than a bundle has")


def _check_name(bundle: Path, marked: str | None) -> None:
    """The name is the one the run was configured with: an old release cannot pose as a new one."""
    manifest = read_json(bundle / parts.MANIFEST, parts.MANIFEST_SCHEMA)
    config = RunConfig.model_validate(json.loads((bundle / "config.json").read_bytes()))
    report = read_document(bundle / parts.DOCUMENTS["report"], "report").body
    wanted = (config.release.name, config.release.version or report["run_id"])
    if (manifest["name"], manifest["version"]) != wanted:
        raise SignatureInvalid(
            f"the manifest calls the bundle {manifest['name']} {manifest['version']}, its run was "
            f"to release {' '.join(wanted)}; fetch the bundle again"
        )
    if marked not in (None, file_digest(bundle / parts.MANIFEST)):
        raise SignatureInvalid("the release marker names another bundle than lies there")


def _check_attestation(bundle: Path, trust: TrustStore) -> None:
    statement = parts.read_attestation(bundle, trust)
    verdict = dict(read_document(bundle / "verdict.json", "verdict").body)
    report = read_document(bundle / parts.DOCUMENTS["report"], "report").body
    verify_document(verdict, trust, "gate", at=report["cumulative"]["ledger_sequence"])
    digests = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    manifest = read_json(bundle / parts.MANIFEST, parts.MANIFEST_SCHEMA)
    title = f"{manifest['name']}/{manifest['version']}"
    wanted = {f"{title}/{name}": file_digest(bundle / name) for name in parts.SUBJECTS}
    if digests != wanted or statement["predicate"] != verdict:
        raise SignatureInvalid("the attestation is about other files or another verdict")
    named = (verdict["allow"], verdict["model_sha"], verdict["report_sha"])
    files = (
        file_digest(bundle / "backbone.keras"),
        file_digest(bundle / parts.DOCUMENTS["report"]),
    )
    if named != (True, *files):
        raise SignatureInvalid("the verdict does not allow this model with this report")


def _check_serving(bundle: Path) -> None:
    try:
        from fedemb.steps.release_model.serving import serving_problem

        problem = serving_problem(bundle / parts.SAVED_MODEL, bundle / "backbone.keras")
    except ModuleNotFoundError as error:
        raise SignatureInvalid(
            f"saved_model cannot be looked into without {error.name}; verify with an installation "
            "that has TensorFlow"
        ) from error
    except (OSError, ValueError, DecodeError) as error:
        raise SignatureInvalid("saved_model cannot be read; fetch the bundle again") from error
    if problem is not None:
        raise SignatureInvalid(problem)


def _decide_again(bundle: Path, copy: Ledger) -> list[str]:
    written = json.loads((bundle / "config.json").read_bytes())
    config = RunConfig.model_validate(written)
    documents: dict[str, Document] = {
        kind: read_document(bundle / name, kind) for kind, name in parts.DOCUMENTS.items()
    }
    report = documents.pop("report").body
    evidence = Evidence(
        config=config,
        config_sha=json_digest(written),
        rounds=read_rounds(bundle / "rounds.jsonl"),
        model_files={
            name: file_digest(bundle / name)
            for name in ("backbone.keras", "model.json", "rounds.jsonl")
        },
        tensors=tuple(stored_tensors(bundle / "backbone.keras")),
        **documents,
    )
    # The clock rule compares with the report's own time: a bundle does not age.
    now = datetime.fromisoformat(str(report["time"])) + timedelta(seconds=1)
    verdict = decide(evidence, report, copy, now=now, same_environment=False)
    problems = [reason.sentence for reason in verdict.reasons]
    if verdict.simulation:
        problems.append("this is a simulation, which is never released")
    return problems


def _live(ledger_uri: str, copy: Ledger, pinned: TrustStore, bundle: Path) -> list[str]:
    """Compares with the live ledger: it holds the same records, and this release."""
    head = copy.head
    try:
        live = open_ledger(ledger_uri, copy.policy_id, trust=pinned)
        live.verify([Anchor(head.sequence, head.sha, "the bundle")])
    except FedEmbError as error:
        return [str(error)]
    sha = file_digest(bundle / parts.MANIFEST)
    released = {
        record.body["bundle_sha"]
        for attempt in live.state.attempts.values()
        for record in attempt.releases
    }
    return [] if sha in released else ["the ledger has no record of this release"]


def _ledger_copy(bundle: Path, pinned: TrustStore) -> Ledger:
    """The ledger inside the bundle; its store is a folder that does not exist."""
    policy_id = json.loads((bundle / "config.json").read_bytes())["policy"]["policy_id"]
    chain = Chain(LocalStore(bundle / "no_store"), policy_id, pinned)
    chain.extend((bundle / "ledger.jsonl").read_bytes().split(b"\n")[:-1])
    return Ledger(chain)
