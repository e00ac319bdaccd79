"""Lineage joins runs by itself, and needs nothing of Kubeflow's."""

import json
from pathlib import Path

from fedemb.reports import lineage
from tests.kit.pipeline_runs import honest_run


def _shared(path) -> dict[str, tuple[str | None, str]]:
    """Artifact -> its digest and its identifier in all runs."""
    found = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        for dataset in (*event["inputs"], *event["outputs"]):
            facets = dataset.get("facets", {})
            for same in facets.get("symlinks", {}).get("identifiers", []):
                version = facets.get("version", {}).get("datasetVersion")
                found[dataset["name"].rpartition("/")[2]] = (version, same["name"])
    return found


def test_a_release_is_named_alike_by_its_own_run_and_by_the_run_that_starts_from_it(tmp_path):
    first = honest_run.start(tmp_path / "first").until_release()
    (bundle,) = Path(first.releases_uri).glob("*/*/lineage.jsonl")
    release = _shared(bundle)["release"][1]
    later = first.config.updated(
        {
            "pretraining.kind": "import",
            "pretraining.import_path": f"{bundle.parent}/backbone.keras",
            "evaluation.previous_release": str(bundle.parent),
        }
    )
    found = lineage.parents_of(later, "later")
    assert found["public_start"] == found["previous_release"] == release
    assert release.startswith("releases/")
    assert _shared(bundle)["policy"][1] == f"policies/{first.config.policy.policy_id}"
