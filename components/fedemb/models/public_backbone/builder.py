"""Builds a Keras network from the tensors of a PyTorch state dict, layer by layer.

Batch normalisation with stored statistics is a scale and an offset of each channel, so it is folded
into the kernel and bias of the convolution before it. The network then has no state, no layer mixes
images, and all of its weights can be trained privately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedemb.errors import ArtifactError
from fedemb.models.arrays import Layer, Model, Node
from fedemb.models.keras_backend import keras_layers

Array = np.ndarray


class Builder:
    """Layers of a network, the weights they will get, and the tensors that were used.

    Args:
      tensors: state dict; arrays by PyTorch's names, in PyTorch's layouts.
      file: name of the file, for errors.
    """

    def __init__(self, tensors: Mapping[str, Array], file: str) -> None:
        self._tensors, self._file = tensors, file
        self._used: set[str] = set()
        self._weights: list[tuple[Layer, Sequence[Array]]] = []

    def take(self, name: str, *shape: int | None) -> Array:
        """Returns a tensor as float64 and marks it as used.

        Args:
          name: name in the state dict.
          *shape: expected shape; None: any size.

        Raises:
          ArtifactError: the tensor is missing, has another shape, or is not finite.
        """
        found = self._tensors.get(name)
        if found is None:
            raise ArtifactError(
                f"{self._file} has no tensor {name!r}, so it is not of this architecture. Check "
                "--architecture"
            )
        wanted = [have if want is None else want for have, want in zip(found.shape, shape)]  # noqa: B905
        if list(found.shape) != wanted or len(found.shape) != len(shape):
            raise ArtifactError(
                f"tensor {name!r} of {self._file} has shape {list(found.shape)}, expected "
                f"{['any' if one is None else one for one in shape]}. Check --architecture"
            )
        self._used.add(name)
        values = found.astype(np.float64)
        if not np.isfinite(values).all():
            raise ArtifactError(
                f"tensor {name!r} of {self._file} holds NaN or infinite weights. Use another file"
            )
        return values

    def has(self, name: str) -> bool:
        """Returns whether the state dict has a tensor."""
        return name in self._tensors

    def kernel_size(self, source: str) -> int:
        """Returns height and width of a convolution's kernel; 1 if the state dict lacks it."""
        found = self._tensors.get(f"{source}.weight")
        return 1 if found is None or found.ndim == 0 else int(found.shape[-1])

    def add(self, layer: Layer, inputs: Node, *weights: Array) -> Node:
        """Calls a layer; its weights are set when the network is finished."""
        return self.set(layer, layer(inputs), *weights)

    def set(self, layer: Layer, outputs: Node, *weights: Array) -> Node:
        """Returns outputs of a layer, whose weights are set when the network is finished."""
        self._weights.append((layer, weights))
        return outputs

    def dense(self, x: Node, name: str, source: str) -> Node:
        """Adds a dense layer along the last axis.

        Args:
          x: `[..., channels]`.
          name: name of the Keras layer.
          source: name of the layer in the state dict.
        """
        import keras

        kernel = self.take(f"{source}.weight", None, x.shape[-1])
        bias = self.take(f"{source}.bias", len(kernel))
        layer = keras.layers.Dense(len(kernel), name=name)
        return self.add(layer, x, kernel.T, bias)

    def convolution(  # noqa: PLR0917 - as torch.nn.Conv2d
        self,
        x: Node,
        name: str,
        source: str,
        norm: str | None = None,
        stride: int = 1,
        padding: int | str = "same",
        *,
        epsilon: float = 1e-5,
        depthwise: bool = False,
    ) -> Node:
        """Adds a convolution with a bias; batch normalisation after it is folded into it.

        Args:
          x: `[batch, height, width, channels]`.
          name: name of the Keras layer.
          source: name of the convolution in the state dict.
          norm: name of the batch normalisation after it, if there is one.
          stride: step in both directions.
          padding: rows of zeros at each side, or TensorFlow's `same`.
          epsilon: constant of the batch normalisation.
          depthwise: whether each channel has its own filter.
        """
        channels = 1 if depthwise else x.shape[-1]
        filters = x.shape[-1] if depthwise else None
        kernel = self.take(f"{source}.weight", filters, channels, None, None)
        count, size = kernel.shape[0], kernel.shape[-1]
        bias = np.zeros(count)
        if self.has(f"{source}.bias"):
            bias = self.take(f"{source}.bias", count)
        if norm is not None:
            scale, offset = self._batch_norm(norm, count, epsilon)
            kernel, bias = kernel * scale[:, None, None, None], bias * scale + offset
        if isinstance(padding, int) and padding:
            x = keras_layers().ZeroPadding2D(padding, name=f"{name}_pad")(x)
        settings = {"strides": stride, "padding": "same" if padding == "same" else "valid"}
        if depthwise:
            layer = keras_layers().DepthwiseConv2D(size, name=name, **settings)
            return self.add(layer, x, kernel.transpose(2, 3, 0, 1), bias)
        layer = keras_layers().Conv2D(count, size, name=name, **settings)
        return self.add(layer, x, kernel.transpose(2, 3, 1, 0), bias)

    def layer_norm(self, x: Node, name: str, source: str) -> Node:
        """Adds a layer normalisation along the last axis; arguments as for `dense`."""
        import keras

        weights = (self.take(f"{source}.{part}", x.shape[-1]) for part in ("weight", "bias"))
        return self.add(keras.layers.LayerNormalization(epsilon=1e-6, name=name), x, *weights)

    def _batch_norm(self, name: str, count: int, epsilon: float) -> tuple[Array, Array]:
        """Returns scale and offset of a batch normalisation with its stored statistics."""
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, variance = (self.take(f"{name}.{part}", count) for part in parts)
        self._used.add(f"{name}.num_batches_tracked")
        scale = gamma / np.sqrt(variance + epsilon)
        return scale, beta - mean * scale

    def finished(self, inputs: Node, outputs: Node, name: str, unused: Sequence[str]) -> Model:
        """Returns the network with its weights.

        Args:
          inputs: input tensor.
          outputs: output tensor.
          name: name of the network.
          unused: prefixes of tensors that the features do not need, such as the classifier.

        Raises:
          ArtifactError: the state dict has further tensors, so it is of another architecture.
        """
        import keras

        left = [one for one in self._tensors if one not in self._used]
        left = [one for one in left if not one.startswith(tuple(unused))]
        if left:
            raise ArtifactError(
                f"{self._file} has the tensor {left[0]!r}, which this architecture does not have. "
                "Check --architecture"
            )
        network = keras.Model(inputs, outputs, name=name)
        for layer, weights in self._weights:
            layer.set_weights([one.astype(np.float32) for one in weights])
        return network
