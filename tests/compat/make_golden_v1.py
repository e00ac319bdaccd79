"""Writes tests/golden/v1: a ledger, a report and a bundle of version 1. Run once, then never.

    python tests/compat/make_golden_v1.py

The files are what later versions must read; only a new version of the schemas gets new ones.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path.insert(0, str(TESTS))
GOLDEN = TESTS / "golden" / "v1"


def main() -> None:
    from fedemb.engine import build_backbone
    from fedemb.foundation.digests import file_digest
    from fedemb.models.loading import save_backbone
    from fedemb.steps.release_model import release
    from tests.kit.pipeline_runs import honest_run

    if GOLDEN.exists():
        sys.exit(f"{GOLDEN} exists; version 1 is written once")
    with tempfile.TemporaryDirectory() as folder:
        run = honest_run.start(Path(folder), **{"model.image_size": 8})
        backbone = build_backbone(run.config.model, seed=0)
        start = run.root / "pretrained" / "backbone.keras"
        save_backbone(backbone, start)
        honest_run.INITIAL_WEIGHTS = file_digest(start)
        random = np.random.default_rng(0)
        for weight in backbone.weights:  # at least as far as the planned noise moves them
            weight.assign(weight + random.normal(0, 0.3, weight.shape))
        run.model.mkdir()
        save_backbone(backbone, run.model / "backbone.keras")
        for act in ("plan", "reserve", "partition"):
            getattr(run, f"do_{act}")()
        run.do_train([{"name": item.path, "shape": list(item.shape)} for item in backbone.weights])
        for act in ("measure", "account", "gate"):
            getattr(run, f"do_{act}")()
        release.run(run.context())
        GOLDEN.mkdir(parents=True)
        shutil.copytree(run.ledger_uri, GOLDEN / "ledger")
        shutil.copytree(run.root / "releases" / "glyphs" / "1.0", GOLDEN / "bundle")
        shutil.copy(run.report, GOLDEN / "privacy_report.json")


if __name__ == "__main__":
    main()
