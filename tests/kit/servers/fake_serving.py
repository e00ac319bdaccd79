"""Stands in for fedemb.release.released where a test needs no TensorFlow."""

from types import SimpleNamespace

from fedemb.documents.model import stored_tensors
from fedemb.foundation.canonical_json import file_digest
from fedemb.release.bundle import PARITY, PREPROCESSING, SAVED_MODEL_FILES
from fedemb.release.verify import _READER


def load_whitelisted(path, start, model):
    return SimpleNamespace(weights=[SimpleNamespace(shape=shape) for shape in _shapes(path)])


def save_for_serving(backbone, model, folder):
    for name in SAVED_MODEL_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(repr(sorted(item.shape for item in backbone.weights)))


def save_preprocessing(backbone, config, bundle, served):
    (bundle / PREPROCESSING).write_bytes(_READER.read_bytes())
    (bundle / PARITY).write_text("as the real one's")


def check_parity(bundle):
    """Of the files above there is nothing to compare."""


def serving_problem(folder, backbone, model):
    shapes = repr(sorted(_shapes(backbone)))
    return None if (folder / SAVED_MODEL_FILES[0]).read_text() == shapes else "other tensors"


def _shapes(path):
    return [tuple(item.shape) for item in stored_tensors(path, file_digest(path))]
