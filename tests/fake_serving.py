"""Stands in for fedemb.steps.release_model.serving where a test needs no TensorFlow."""

from types import SimpleNamespace

from fedemb.documents.model_files import stored_tensors
from fedemb.steps.release_model.bundle import SAVED_MODEL_FILES


def load_whitelisted(path, start, model):
    return SimpleNamespace(
        weights=[SimpleNamespace(shape=tuple(item["shape"])) for item in stored_tensors(path)]
    )


def save_for_serving(backbone, model, folder):
    for name in SAVED_MODEL_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(repr(sorted(item.shape for item in backbone.weights)))


def serving_problem(folder, backbone):
    shapes = repr(sorted(tuple(item["shape"]) for item in stored_tensors(backbone)))
    return None if (folder / SAVED_MODEL_FILES[0]).read_text() == shapes else "other tensors"
