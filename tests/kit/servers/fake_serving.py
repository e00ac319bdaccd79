"""Stands in for fedemb.release.released where a test needs no TensorFlow."""

from types import SimpleNamespace

from fedemb.documents.model import stored_tensors
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.files import write_bytes
from fedemb.release.bundle import PARITY, PREPROCESSING, SAVED_MODEL, SAVED_MODEL_FILES
from fedemb.release.verify import _READER


def load_whitelisted(path, start, model):
    return SimpleNamespace(weights=[SimpleNamespace(shape=shape) for shape in _shapes(path)])


def save_for_users(backbone, config, bundle):
    for name in SAVED_MODEL_FILES:
        shapes = repr(sorted(item.shape for item in backbone.weights))
        write_bytes(bundle / SAVED_MODEL / name, shapes.encode())
    (bundle / PREPROCESSING).write_bytes(_READER.read_bytes())
    (bundle / PARITY).write_text("as the real one's")


def ReleasedModel(bundle):
    return SimpleNamespace(check_parity=lambda: None)


def serving_problem(folder, backbone, model):
    shapes = repr(sorted(_shapes(backbone)))
    return None if (folder / SAVED_MODEL_FILES[0]).read_text() == shapes else "other tensors"


def _shapes(path):
    return [tuple(item.shape) for item in stored_tensors(path, file_digest(path))]
