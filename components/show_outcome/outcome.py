"""What a run came to, on one page of Kubeflow's, also where a step refused.

Kubeflow shows no exit code but 1 and no output of a step that failed. This step runs at the end,
however the run ended, and collects what the others left in the public root. It reads no ledger and
has no key, so it verifies nothing and nothing follows from it: the gate has decided, and
`fedemb verify` is what a release is checked with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fedemb.documents.artifacts import write_bytes
from fedemb.outcome import newest, outcomes, run_folder
from fedemb.reports.figures import privacy_figures, utility_figures
from fedemb.step_context import StepContext

DOCUMENTS = ("verdict", "privacy_report", "utility_report", "release")
EXIT_CODES = {
    0: "done",
    1: "a bug or a broken environment: report the log",
    2: "the configuration or an input is wrong: correct it, start again",
    3: "refused by a rule of privacy: trying again changes nothing",
    4: "a store could not be reached: worth trying again under the same run id",
    5: "interrupted: submit again under the same run id to go on",
}


def run(context: StepContext, *, uri: str, state: str) -> dict[str, float]:
    """Writes the page `outcome` and a copy of the `verdict`.

    Args:
      context: of the step.
      uri: where `outcome` goes; the run's other outputs lie beside it.
      state: how Kubeflow says the run ended, such as `SUCCEEDED` or `FAILED`.

    Returns:
      Figures that runs are compared by; only those that the run has.

    Raises:
      StorageError: the public root cannot be read.
    """
    folder = run_folder(uri, "show-outcome")
    # After a retry that went well the failure before it still lies there.
    kept = [] if state == "SUCCEEDED" else outcomes(folder)
    failed = sorted(kept, key=lambda item: item["step"])
    found = {name: newest(folder, name) for name in DOCUMENTS}
    documents = {name: json.loads(data) for name, data in found.items() if data}
    page = "\n".join(_page(state, folder, failed, documents)) + "\n"
    write_bytes(context.artifacts.outcome, page.encode())
    write_bytes(context.artifacts.verdict, found["verdict"] or b"{}")
    codes = [int(item["exit_code"]) for item in failed]
    code = max(codes, default=0 if state == "SUCCEEDED" else 1)
    return {"exit_code": float(code), **figures(documents)}


def figures(documents: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Price, utility and verdict of a run as plain numbers.

    Args:
      documents: name -> content, as far as the run came.
    """
    found: dict[str, float] = {}
    if verdict := documents.get("verdict"):
        found["allowed"] = float(verdict["allow"])
    if report := documents.get("privacy_report"):
        found |= privacy_figures(report)
    if utility := documents.get("utility_report"):
        found |= utility_figures(utility)
    return found


def _page(
    state: str,
    folder: str,
    failed: list[dict[str, Any]],
    documents: dict[str, dict[str, Any]],
) -> Iterator[str]:
    yield f"# {_headline(state, failed, documents)}"
    for item in failed:
        yield f"\n**{item['step']}** ended with exit code {item['exit_code']}, {item['error']}:"
        yield f"\n> {item['message']}\n"
        yield EXIT_CODES.get(int(item["exit_code"]), "see the log of the step") + "."
    reasons = documents.get("verdict", {}).get("reasons", [])
    if reasons:
        yield "\nRules that deny:\n"
        yield from (f"- `{reason}`" for reason in reasons)
    if numbers := figures(documents):
        yield "\n| figure | value |\n|---|---|"
        yield from (f"| {name} | {value:.6g} |" for name, value in numbers.items())
    if uri := documents.get("release", {}).get("uri"):
        yield f"\nRelease: `{uri}`"
    yield f"\nAll that may be shown of this run lies at `{folder}`. This page verifies nothing."


def _headline(
    state: str, failed: list[dict[str, Any]], documents: dict[str, dict[str, Any]]
) -> str:
    if failed:
        return "Refused" if any(item["exit_code"] == 3 for item in failed) else "Stopped"
    if state != "SUCCEEDED":
        return "Stopped; no step reported an error: look at the pods"
    if documents.get("verdict", {}).get("simulation"):
        return "A simulation, which is never released"
    return "Released" if documents.get("release", {}).get("uri") else "Done"
