"""Folds batch normalisation of a Keras network into its convolutions, exactly.

With its stored statistics, batch normalisation is a scale and an offset of each channel. They are
multiplied into the kernel and bias of the layer before it, if its output has no other use. Any
other batch normalisation becomes a depthwise convolution of one pixel. The network then computes
the same function, mixes no images, and all of its weights can be trained privately.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np

from fedemb.errors import ConfigError
from fedemb.models.arrays import Layer, Model, Node
from fedemb.models.keras_backend import all_layers

_FOLDED_INTO = ("Conv2D", "DepthwiseConv2D", "SeparableConv2D", "Dense")

Array = np.ndarray


def without_batch_norm(network: Model) -> Model:
    """Returns a network that computes the same function without batch normalisation.

    Args:
      network: `keras.Model`, a graph of layers; inner models are folded too.

    Raises:
      ConfigError: the network is not a graph of layers, or normalises along another axis than the
        channels.
    """
    import keras

    layers = all_layers(network, include_self=False)
    norms = [layer for layer in layers if type(layer).__name__ == "BatchNormalization"]
    dropped = [layer for layer in layers if type(layer).__name__ == "Dropout"]
    if not norms and not dropped:
        return network
    network = graph_of(network)
    before = {id(norm): _foldable(norm) for norm in norms}
    sources = {id(source) for source in before.values() if source is not None}
    copies: dict[int, Layer] = {}
    affine: set[int] = set()

    def copy(layer: Layer) -> Layer:
        config = layer.get_config()
        kind: type[Layer] = type(layer)
        if id(layer) in before:
            if before[id(layer)] is not None:
                kind, config = keras.layers.Identity, {"name": layer.name}
            else:
                kind, config = _affine_kind(layer)
        elif id(layer) in sources:
            config = {**config, "use_bias": True}
        elif kind.__name__ == "Dropout":
            kind, config = keras.layers.Identity, {"name": layer.name}
        copies[id(layer)] = made = kind.from_config(config)
        if id(layer) in before:
            affine.add(id(made))
        return made

    def call(layer: Layer, *inputs: Node, **options: object) -> Node:
        if type(layer) is keras.layers.Identity:
            return inputs[0]
        if id(layer) in affine:  # without the options of batch normalisation
            return layer(inputs[0])
        return layer(*inputs, **options)

    cloned = _cloned(network, copy, call)
    for layer in layers:
        made = copies.get(id(layer))
        if made is None or id(layer) in before or id(layer) in sources:
            continue
        if layer.weights and type(layer) is type(made) and not hasattr(layer, "layers"):
            made.set_weights(layer.get_weights())
    for norm in norms:
        _fold(norm, before[id(norm)], copies)
    return cloned


def _fold(norm: Layer, source: Layer | None, copies: Mapping[int, Layer]) -> None:
    """Writes scale and offset of a normalisation into the copy of its source, or into its own."""
    scale, offset = _scale_and_offset(norm)
    if source is None:
        copies[id(norm)].set_weights(_affine_weights(norm, scale, offset))
    else:
        copies[id(source)].set_weights(_folded_weights(source, scale, offset))


def applied(network: Model, x: Node) -> Node:
    """Returns the output of a network's layers on a symbolic tensor, in the graph of that tensor.

    Unlike a call of the network, this adds its layers to the graph, and not one inner network.
    """
    return graph_of(network)._run_through_graph([x], operation_fn=lambda layer: layer)


def graph_of(network: Model) -> Model:
    """Returns a network as a graph of layers.

    Raises:
      ConfigError: the network has code of its own between its layers.
    """
    import keras

    if isinstance(network, keras.Sequential):
        network = keras.Model(network.inputs, network.outputs, name=network.name)
    if not hasattr(network, "_run_through_graph"):
        raise ConfigError(
            f"network {network.name} is not a graph of layers. Build it with the functional API"
        )
    return network


def _cloned(network: Model, copy: Callable[[Layer], Layer], call: Callable[..., Node]) -> Model:
    import keras

    return keras.models.clone_model(
        network, clone_function=copy, call_function=call, recursive=True
    )


def maker(node: Node) -> Layer:
    """Returns the layer whose output a node is."""
    return vars(node)["_keras_history"].operation


def _input(layer: Layer) -> Node:
    return cast("Node", layer.input)  # of a layer with one input


def _foldable(norm: Layer) -> Layer | None:
    """Returns the layer that a batch normalisation can be folded into, or None."""
    if len(norm._inbound_nodes) != 1:
        return None
    source = maker(_input(norm))
    alone = len(source._inbound_nodes) == 1 and len(source._outbound_nodes) == 1
    linear = getattr(getattr(source, "activation", None), "__name__", "linear") == "linear"
    return source if alone and linear and type(source).__name__ in _FOLDED_INTO else None


def _scale_and_offset(norm: Any) -> tuple[Array, Array]:
    """Returns scale and offset of a batch normalisation with its stored statistics."""
    axis = norm.axis if isinstance(norm.axis, int) else norm.axis[0]
    rank = len(norm.input.shape)
    if axis not in (-1, rank - 1):
        raise ConfigError(
            f"layer {norm.name} normalises axis {axis}, expected the last one. Build the network "
            "with channels in the last axis"
        )
    mean, variance = (
        np.asarray(value, np.float64) for value in (norm.moving_mean, norm.moving_variance)
    )
    scale = 1 / np.sqrt(variance + norm.epsilon)
    if norm.scale:
        scale = scale * np.asarray(norm.gamma, np.float64)
    offset = -mean * scale
    if norm.center:
        offset = offset + np.asarray(norm.beta, np.float64)
    return scale, offset


def _folded_weights(layer: Any, scale: Array, offset: Array) -> list[Array]:
    """Returns the weights of a layer that includes the batch normalisation after it."""
    kind = type(layer).__name__
    found = {id(weight): np.asarray(weight, np.float64) for weight in layer.weights}
    target = id(layer.pointwise_kernel if kind == "SeparableConv2D" else layer.kernel)
    kernel = found[target]
    found[target] = kernel * (scale.reshape(kernel.shape[2:]) if kind[:5] == "Depth" else scale)
    bias = np.asarray(layer.bias, np.float64) if layer.use_bias else np.zeros(len(scale))
    kernels = [found[id(weight)] for weight in layer.weights if weight is not layer.bias]
    return [one.astype(np.float32) for one in (*kernels, bias * scale + offset)]


def _affine_kind(norm: Layer) -> tuple[type[Layer], dict[str, object]]:
    """Returns class and settings of a layer with a scale and an offset of each channel."""
    import keras

    if len(_input(norm).shape) == 4:
        return keras.layers.DepthwiseConv2D, {"kernel_size": 1, "name": norm.name}
    raise ConfigError(
        f"batch normalisation {norm.name} does not follow a convolution or a dense layer, so it "
        "cannot be folded. Keep the file frozen with model.trainable: projection or head"
    )


def _affine_weights(norm: Layer, scale: Array, offset: Array) -> list[Array]:
    channels = _input(norm).shape[-1]
    return [scale.reshape(1, 1, channels, 1).astype(np.float32), offset.astype(np.float32)]
