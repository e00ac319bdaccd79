"""What may be inside a SavedModel: the backbone's tensors, and constants too small to be a head.

A head, an un-noised update or a table of users could also be baked into the graph as a constant,
where no list of variables shows it. So every tensor in every attribute of every node and function
is looked at: a numeric constant is small or equal to one of the backbone's weights, small ones stay
few, and texts are no longer than names of variables are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedemb.documents.artifacts import sha256_hex
from fedemb.documents.model_files import stored_values

SMALL = 16
"""Elements of a numeric constant that need not be a weight: shapes, axes, epsilons, scales. The
largest of our backbones has 8."""
FLOATS = 32
"""Real numbers in all small constants together, and one more per tensor of the backbone."""
TEXT_BYTES = 512
"""Bytes of one text, and as many more per tensor of the backbone as half of this: the checkpoint's
own list of tensors is one text."""
COLLECTIONS = {"saved_model_main_op"}


def serving_problem(folder: Path, backbone: Path) -> str | None:
    """Compares a SavedModel with the backbone it must serve.

    Args:
      folder: of the SavedModel.
      backbone: the `.keras` file with the only weights that may be inside.

    Returns:
      What is wrong, or None.
    """
    import tensorflow as tf

    weights = stored_values(backbone)
    reader = tf.train.load_checkpoint((folder / "variables" / "variables").as_posix())
    names = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
    found = [reader.get_tensor(name) for name in names]
    shapes = [sorted(value.shape for value in values) for values in (found, weights)]
    if shapes[0] != shapes[1]:
        return "saved_model holds other tensors than the backbone"
    if sorted(map(_digest, found)) != sorted(map(_digest, weights)):
        return "saved_model holds other values of its tensors than backbone.keras"
    return _graph_problem(folder, weights)


def _digest(value: Any) -> str:
    array = np.ascontiguousarray(value)
    return f"{array.dtype.str}{array.shape}{sha256_hex(array.tobytes())}"


def _graph_problem(folder: Path, weights: list[np.ndarray]) -> str | None:
    from tensorflow.core.protobuf import saved_model_pb2

    model: Any = saved_model_pb2.SavedModel()
    model.ParseFromString((folder / "saved_model.pb").read_bytes())
    if len(model.meta_graphs) != 1:
        return f"saved_model holds {len(model.meta_graphs)} graphs, expected one"
    graph = model.meta_graphs[0]
    extra = set(graph.collection_def) - COLLECTIONS
    if extra or graph.asset_file_def:
        return f"saved_model holds collections or assets of its own: {', '.join(sorted(extra))}"
    floats = 0
    for where, value in _values(graph.graph_def):
        problem = _value_problem(value, weights)
        if problem is not None:
            return f"{where} of saved_model {problem}"
        if not isinstance(value, str | bytes | tuple) and _size(value) <= SMALL and _is_real(value):
            floats += _size(value)
    if floats > FLOATS + len(weights):
        return (
            f"saved_model holds {floats} real numbers in small constants, expected at most "
            f"{FLOATS + len(weights)}"
        )
    return None


def _value_problem(value: Any, weights: list[np.ndarray]) -> str | None:
    if isinstance(value, str | bytes):
        longest = TEXT_BYTES + TEXT_BYTES // 2 * len(weights)
        return f"holds a text of {len(value)} bytes" if len(value) > longest else None
    size = _size(value)
    if isinstance(value, tuple):  # numbers of arguments: at most one per tensor
        return f"lists {size} integers" if size > SMALL + len(weights) else None
    if size > SMALL and not any(_same(value, weight) for weight in weights):
        return (
            f"holds {size} numbers that are no weight of the backbone; a constant must not carry "
            "a head or data"
        )
    return None


def _values(graph: Any) -> Iterator[tuple[str, Any]]:
    """Every text, list of numbers and tensor in a graph and its functions, with where it is."""
    nodes = [(node.name, node.attr) for node in graph.node]
    for function in graph.library.function:
        name = function.signature.name
        nodes.append((name, function.attr))
        nodes += [(name, argument.attr) for argument in function.arg_attr.values()]
        nodes += [(f"{name}/{node.name}", node.attr) for node in function.node_def]
    for where, attributes in nodes:
        yield from _attribute_values(where, attributes)


def _attribute_values(where: str, attributes: Any) -> Iterator[tuple[str, Any]]:
    for attribute in attributes.values():
        kind = attribute.WhichOneof("value")
        if kind == "s":
            yield where, attribute.s
        elif kind == "tensor":
            yield from _tensor_values(where, attribute.tensor)
        elif kind == "func":
            yield from _attribute_values(where, attribute.func.attr)
        elif kind == "list":
            listed = attribute.list
            yield from ((where, text) for text in listed.s)
            yield where, tuple(listed.i)
            yield where, np.array(listed.f, np.float32)
            for tensor in listed.tensor:
                yield from _tensor_values(where, tensor)
            for function in listed.func:
                yield from _attribute_values(where, function.attr)


def _tensor_values(where: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """A tensor as it is stored: one value that stands for a whole shape is not blown up."""
    import tensorflow as tf

    if tensor.dtype == tf.string.as_datatype_enum:
        yield from ((where, text) for text in tensor.string_val)
    else:
        yield where, tensor


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray | tuple):
        return np.size(value)
    size = 1
    for dimension in value.tensor_shape.dim:
        size *= max(0, dimension.size)
    stored = sum(_lengths(value))
    return max(size, stored)


def _lengths(tensor: Any) -> Iterable[int]:
    for field, content in tensor.ListFields():
        if field.name == "tensor_content":
            yield len(content) // 8
        elif field.name.endswith("_val"):
            yield len(content)


def _is_real(value: Any) -> bool:
    import tensorflow as tf

    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f"
    return not (tf.as_dtype(value.dtype).is_integer or tf.as_dtype(value.dtype).is_bool)


def _same(value: Any, weight: np.ndarray) -> bool:
    import tensorflow as tf

    if isinstance(value, np.ndarray) or _size(value) != weight.size:
        return False
    return np.array_equal(tf.make_ndarray(value).ravel(), weight.ravel())
