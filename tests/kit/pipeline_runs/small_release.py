"""A released model of eight pixels, with its SavedModel."""

from pathlib import Path

import numpy as np
import pytest

from fedemb.foundation.canonical_json import file_digest
from tests.kit.pipeline_runs import honest_run


def make(root: Path) -> Path:
    """Writes `bundle` and `ledger` (with `trust.json`) below a folder, and returns the folder."""
    from fedemb.models.backbone_files import save_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.steps import release_model

    run = honest_run.start(root / "run", **{"model.image_size": 8})
    backbone = build_backbone(run.config.model, seed=0)
    first = run.root / "pretrained" / "backbone.keras"
    save_backbone(backbone, first)
    random = np.random.default_rng(0)
    for weight in backbone.weights:  # at least as far as the planned noise moves them
        weight.assign(weight + random.normal(0, 0.3, weight.shape))
    run.model.mkdir()
    save_backbone(backbone, run.model / "backbone.keras")
    tensors = [{"name": item.path, "shape": list(item.shape)} for item in backbone.weights]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(honest_run, "INITIAL_WEIGHTS", file_digest(first))
        run.do("plan reserve partition")
        run.do_train(tensors)
        run.do("measure account gate")
        release_model.run(run.context())
    Path(run.ledger_uri).rename(root / "ledger")
    (run.root / "releases" / "glyphs" / "1.0").rename(root / "bundle")
    return root
