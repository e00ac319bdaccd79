"""Named groups of variables that private training may change."""

from __future__ import annotations

from collections.abc import Sequence

from fedemb.errors import ConfigError
from fedemb.models.arrays import Model, Variable
from fedemb.models.classifier import HEAD

_PROJECTION = ("embedding/", "embedding_hidden/")


def _is_norm(path: str) -> bool:
    return path.endswith(("/gamma", "/beta"))


def _block(path: str) -> str:
    return path.split("/", 1)[0].split("_", 1)[0]


def _is_convolution(path: str) -> bool:
    return path.endswith("kernel") and "conv" in path


def cut(model: Model, group: str) -> tuple[Model, Model]:
    """Splits a model into its frozen part and the layers that private training changes.

    Args:
      model: a backbone or classifier, which shares its layers with both.
      group: `head` or `projection`.

    Returns:
      `keras.Model`s: images to features `[batch, features]`, and features to the model's output.

    Raises:
      ConfigError: the trainable layers are not at the end of the model.
    """
    import keras

    names = (HEAD,) if group == "head" else ("embedding_hidden", "embedding")
    first = next((layer for layer in model.layers if layer.name in names), None)
    if first is None or len(first.input.shape) != 2:
        raise ConfigError(
            f"model.trainable={group} needs a layer {names[-1]} at the end of {model.name}, on "
            "features of one axis. Rename the layer, or set another model.trainable."
        )
    return (
        keras.Model(model.input, first.input, name=model.name),
        keras.Model(first.input, model.output, name=model.name),
    )


def trainable_variables(backbone: Model, group: str = "all") -> Sequence[Variable]:
    """Returns the variables that private training may change, in the order of the model.

    Args:
      backbone: from `build_backbone` or loaded, or a classifier made of one; the head of a
          classifier trains with every group.
      group: `all`; `head`: only the head of a classifier; `norm_only`: scales and offsets of
          normalisation layers; `last_block`: the last block of layers and the dense layer;
          `projection`: the dense layers that make an embedding of features; `conv_frozen`: all
          except convolution kernels; `first_blocks_frozen`: all except the stem and the
          first block or stage of blocks (arXiv 2201.12328).

    Raises:
      ConfigError: the group contains no variable of this backbone.
    """
    variables = list(backbone.trainable_variables)
    blocks = [
        _block(v.path) for v in variables if not v.path.startswith((*_PROJECTION, f"{HEAD}/"))
    ]
    first = {"stem", *[block for block in blocks if block != "stem"][:1]}
    chosen = {
        "all": lambda path: True,
        "head": lambda path: False,
        "norm_only": _is_norm,
        "last_block": lambda path: path.startswith(_PROJECTION) or _block(path) == blocks[-1],
        "projection": lambda path: path.startswith(_PROJECTION),
        "conv_frozen": lambda path: not _is_convolution(path),
        "first_blocks_frozen": lambda path: _block(path) not in first,
    }[group]
    found = [v for v in variables if v.path.startswith(f"{HEAD}/") or chosen(v.path)]
    if not found:
        raise ConfigError(
            f"model.trainable={group} leaves nothing to train in {backbone.name}; take another"
            " group"
        )
    return found
