"""A released run with a real, tiny backbone, and its SavedModel."""

from pathlib import Path

import numpy as np

from tests.kit.pipeline_runs import honest_run


def released(root: Path, image_size: int = 28) -> honest_run.HonestRun:
    """A run whose `backbone` was released, as its `document` says."""
    from fedemb.models.backbone_files import save_backbone
    from fedemb.models.backbones import build_backbone
    from fedemb.steps import release_model

    run = honest_run.start(root, **{"model.image_size": image_size})
    run.backbone = build_backbone(run.config.model, seed=0)
    save_backbone(run.backbone, run.pretrained / "backbone.keras")
    random = np.random.default_rng(0)
    for weight in run.backbone.weights:  # at least as far as the planned noise moves them
        weight.assign(weight + random.normal(0, 0.3, weight.shape).astype(np.float32))
    run.model.mkdir()
    save_backbone(run.backbone, run.model / "backbone.keras")
    tensors = [{"name": item.path, "shape": list(item.shape)} for item in run.backbone.weights]
    run.do("plan reserve partition")
    run.do_train(tensors)
    run.do("measure account gate")
    run.document = release_model.run(run.context())
    return run


def make(root: Path) -> Path:
    """Writes `bundle` and `ledger` (with `trust.json`) below a folder, and returns the folder."""
    run = released(root / "run", 8)
    Path(run.ledger_uri).rename(root / "ledger")
    run.bundle.rename(root / "bundle")
    return root
