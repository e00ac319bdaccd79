"""The first page of a run: how it ended, its steps, reports, budget and artifacts."""

from __future__ import annotations

from typing import Any

from fedemb.documents.artifacts import file_digest, json_digest, tree_digest
from fedemb.ledger.history import history, worst_block
from fedemb.ledger.ledger import open_ledger, read_trust
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.local import PAGES
from fedemb.reports.report import render_run_index, significant
from fedemb.storage import open_store

AFTER: dict[str, tuple[str, ...]] = {
    "plan_privacy": (),
    "pretrain_public": (),
    "reserve_budget": ("plan_privacy",),
    "partition_users": ("reserve_budget",),
    "train_dp_fedemb": ("partition_users", "pretrain_public"),
    "evaluate_embeddings": ("train_dp_fedemb",),
    "audit_privacy": ("train_dp_fedemb",),
    "account_privacy": ("evaluate_embeddings", "audit_privacy"),
    "gate_release": ("account_privacy",),
    "release_model": ("gate_release",),
}
"""The arrows of the pipeline, without those that follow from others. A test holds them against
the compiled pipeline."""

ARTIFACTS = (
    ("plan_privacy", "privacy_plan", "Public"),
    ("pretrain_public", "pretrained", "Public"),
    ("reserve_budget", "reservation", "Public"),
    ("partition_users", "users", "Public"),
    ("train_dp_fedemb", "model", "Noised"),
    ("evaluate_embeddings", "utility_report", "un-noised on evaluation users"),
    ("audit_privacy", "audit_report", "Public (figures are private)"),
    ("account_privacy", "privacy_report", "Public"),
    ("gate_release", "verdict", "Public"),
    ("release_model", "release", "Public"),
)
"""Step, output, kind."""

TITLES = {
    "privacy_report": "Privacy report",
    "utility_report": "Utility report",
    "audit_report": "Audit report",
}


def render_index(run: RunDirectory) -> str:
    """Returns the page of a run, finished or not."""
    state = run.read_state()
    lines = dict(line.split(": ", 1) for line in state.get("closing_lines", []))
    config = run.config()
    gain = _gain(run)
    report = run.document("account_privacy", "privacy_report")
    return render_run_index(
        run_id=run.run_id,
        purpose=config.purpose,
        headline=_headline(run, config.purpose, lines.get("release", "none"), gain),
        gained=gain is None or gain["low"] > 0,
        time=report["time"] if report else None,
        guarantee=lines.get("guarantee", "none"),
        utility=lines.get("utility", "not measured"),
        release=_below(run, lines.get("release", "none")),
        steps=[_step(name, run, state) for name in AFTER],
        reports=[_report(name, run) for name in PAGES if (run.reports / f"{name}.html").exists()],
        budget=_budget(run),
        artifacts=[_artifact(run, *row) for row in ARTIFACTS if run.output(row[0], row[1])],
        facts=(
            ("configuration", json_digest(config.model_dump(mode="json"))[:12]),
            (
                "private artifacts",
                f"{config.storage.private_root or 'private/'} (readable by the data owner only)",
            ),
            ("log", run.log.name),
        ),
    )


def _gain(run: RunDirectory) -> dict[str, float] | None:
    """Recall of the model less that of the public start, at the first false accept rate."""
    utility = run.document("evaluate_embeddings", "utility_report") or {}
    public = utility.get("public_backbone")
    return next(iter(public["difference"].values())) if public else None


def _headline(run: RunDirectory, purpose: str, release: str, gain: dict[str, float] | None) -> str:
    """How the run ended, in one line."""
    report = run.document("account_privacy", "privacy_report")
    if release.startswith("refused: "):
        return f"Refused: {release.removeprefix('refused: ')}"
    points = ""
    if gain is not None:
        points = f", {100 * gain['value']:+.1f} points over the public start"
        if gain["low"] <= 0 <= gain["high"]:
            points += ", which may be chance"
    if purpose == "simulation":
        return f"Simulation: nothing is released{points}"
    if report is None or release.startswith("none"):
        return "Not released: the run did not come to its end"
    epsilon = significant(report["accounting"]["epsilon"])
    return f"Released: epsilon {epsilon} for one {report['unit']['unit']}{points}"


def _below(run: RunDirectory, release: str) -> str:
    """An address without the folder of the run, where it lies in it."""
    return release.removeprefix(f"{run.root}/")


def _step(name: str, run: RunDirectory, state: dict[str, Any]) -> dict[str, Any]:
    seconds = state.get("seconds", {})
    status = "done" if name in seconds else "waiting"
    if state.get("failed_step") == name:
        status = "refused" if state.get("exit_code") == 3 else "failed"
    page = next((key for key, (step, *_) in PAGES.items() if step == name), None)
    shown = page is not None and (run.reports / f"{page}.html").exists()
    return {
        "name": name,
        "after": AFTER[name],
        "status": status,
        "seconds": seconds.get(name),
        "href": f"reports/{page}.html" if shown else None,
    }


def _report(name: str, run: RunDirectory) -> dict[str, str]:
    """Link and what is behind it; the page's head has said guarantee and utility already."""
    step, _, output = PAGES[name]
    document = run.document(step, output) or {}
    sentences = {
        "privacy_report": "What is guaranteed, what it cost, and what it rests on. Signed.",
        "utility_report": "Verification and retrieval on identities that never trained.",
        "audit_report": document.get("sentence", ""),
    }
    return {"title": TITLES[name], "href": f"reports/{name}.html", "sentence": sentences[name]}


def _budget(run: RunDirectory) -> dict[str, Any] | None:
    """What the fullest block had spent before this run's reservation, and has now."""
    report = run.document("account_privacy", "privacy_report")
    if report is None or report["cumulative"]["max_block_epsilon"] is None:
        return None
    cumulative = report["cumulative"]
    store = open_store(run.stores()["ledger"])
    ledger = open_ledger(store.uri, cumulative["policy_id"], trust=read_trust(store))
    block = worst_block(ledger, tuple(row["block"] for row in cumulative["blocks"]))
    points = history(ledger, block, cumulative["ledger_sequence"]) if block else []
    before = [point.epsilon for point in points if point.run_id != run.run_id]
    spent = before[-1] if before else 0.0
    return {
        "label": f"epsilon of policy {cumulative['policy_id']} at delta {cumulative['delta']:g}",
        "spent_before": spent,
        "spent_now": cumulative["max_block_epsilon"] - spent,
        "cap": cumulative["cap"],
    }


def _artifact(run: RunDirectory, step: str, output: str, kind: str) -> dict[str, Any]:
    path = run.output(step, output)
    assert path is not None  # filtered by the caller
    digest = tree_digest(path) if path.is_dir() else file_digest(path)
    return {
        "name": output,
        "kind": kind,
        "step": step,
        "path": path.relative_to(run.root).as_posix(),
        "digest": digest,
    }
