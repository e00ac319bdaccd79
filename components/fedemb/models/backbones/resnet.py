"""Residual networks with GroupNorm: from the paper's code, and for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedemb.config import ModelConfig
from fedemb.models.arrays import LayerMaker, Node
from fedemb.models.backbones.blocks import convolution, embedding, group_norm, joined
from fedemb.models.backbones.registry import backbone
from fedemb.models.keras_backend import input_node
from fedemb.models.keras_backend import keras_layers as layers
from fedemb.models.mirror_image import mirror_layer
from fedemb.models.whitened import whitened_layer

if TYPE_CHECKING:
    from keras.regularizers import L2

_GROUPS, _WIDE_GROUPS = 8, 32


def _basic_block(  # noqa: PLR0917 - the shape of a block, as every paper lists it
    x: Node, model: ModelConfig, conv: LayerMaker, filters: int, stride: int, name: str
) -> Node:
    shortcut = x
    x = conv(filters, 3, strides=stride, padding="same", use_bias=False, name=f"{name}_conv1")(x)
    x = layers().ReLU(name=f"{name}_relu1")(group_norm(x, model, f"{name}_norm1", _GROUPS))
    x = conv(filters, 3, padding="same", use_bias=False, name=f"{name}_conv2")(x)
    x = group_norm(x, model, f"{name}_norm2", _GROUPS)
    if stride != 1 or shortcut.shape[-1] != filters:
        shortcut = conv(filters, 1, strides=stride, use_bias=False, name=f"{name}_shortcut_conv")(
            shortcut
        )
        shortcut = group_norm(shortcut, model, f"{name}_shortcut_norm", _GROUPS)
    return layers().ReLU(name=f"{name}_relu2")(joined(x, shortcut, model, name, _GROUPS))


def _small_resnet(
    x: Node,
    model: ModelConfig,
    blocks: int,
    *,
    widths: tuple[int, ...] = (16, 32, 64),
    stem: tuple[int, int] = (3, 1),
) -> Node:
    """A stem (kernel, stride), then stages of basic blocks; later stages start with stride 2."""
    conv = convolution(model, "plain" if model.backbone.endswith("_ws") else "none")
    kernel, stride = stem
    x = conv(widths[0], kernel, strides=stride, padding="same", use_bias=False, name="stem_conv")(x)
    x = layers().ReLU(name="stem_relu")(group_norm(x, model, "stem_norm", _GROUPS))
    for stage, filters in enumerate(widths, start=1):
        for index in range(1, blocks + 1):
            stride = 2 if stage > 1 and index == 1 else 1
            x = _basic_block(x, model, conv, filters, stride, f"block{stage}_{index}")
    return x


def _pooled(x: Node, model: ModelConfig) -> Node:
    return embedding(layers().GlobalAveragePooling2D(name="pool")(x), model)


@backbone("resnet8")
@backbone("resnet8_ws")
def resnet8(x: Node, model: ModelConfig) -> Node:
    """ResNet-8 for small images: 16, 32 and 64 channels, GroupNorm with 8 groups."""
    return _pooled(_small_resnet(x, model, 1), model)


@backbone("resnet8_s2")
def resnet8_s2(x: Node, model: ModelConfig) -> Node:
    """ResNet-8 of 32, 64 and 64 channels behind a 5x5 stem of stride 2: as fast as LeNet at 28x28.

    163,680 parameters with one channel and 128 dimensions.
    """
    return _pooled(_small_resnet(x, model, 1, widths=(32, 64, 64), stem=(5, 2)), model)


def _quarters(x: Node, model: ModelConfig) -> Node:
    x = _small_resnet(x, model, 1, widths=(64, 160, 320), stem=(6, 2))
    return layers().AveragePooling2D(x.shape[1] // 2, name="quarters")(x)


def _of_both(x: Node, model: ModelConfig) -> Node:
    """Returns the mean output over an image and its mirror image, computed by one network.

    The network is a separate model with a vector as output, so public training trains only it.
    """
    import keras

    images = input_node(x.shape[1:], "one_way")
    quarters = _quarters(images, model)
    net = keras.Model(images, layers().Flatten(name="flatten_net")(quarters), name="net")
    turned = mirror_layer()(name="mirror_image")(x)
    mean = layers().Average(name="both_ways")([net(x), net(turned)])
    return layers().Reshape(quarters.shape[1:], name="quarters_of_both")(mean)


@backbone("resnet8_wide", mirrors=True)
def resnet8_wide(x: Node, model: ModelConfig) -> Node:
    """ResNet-8 of 64, 160 and 320 channels, for public backbones: means of the four quarters.

    1,280 features without a projection; `whitened_directions` scales them to one size. The stem has
    6x6 kernels and stride 2, which removes three quarters of the pixels, the largest cost, before
    the first block. The wider stages use the saved time.
    """
    x = _of_both(x, model) if model.mirrored else _quarters(x, model)
    if model.whitened_directions:
        return embedding(
            whitened_layer()(directions=model.whitened_directions, name="whitened")(x), model
        )
    return embedding(layers().Flatten(name="flatten")(x), model)


@backbone("resnet18_gn")
def resnet18(x: Node, model: ModelConfig) -> Node:
    """ResNet-18 with GroupNorm, 64 to 512 channels; a 3x3 stem, for images of 32 to 64 pixels.

    The network of Kurakin et al. (arXiv 2201.12328), which at 224 pixels has a 7x7 stem and a pool.
    """
    return _pooled(_small_resnet(x, model, 2, widths=(64, 128, 256, 512)), model)


def _decay() -> L2:
    import keras

    return keras.regularizers.L2(1e-4)


def _bottleneck(  # noqa: PLR0917 - as _basic_block
    x: Node, model: ModelConfig, layer: LayerMaker, filters: int, stride: int, name: str
) -> Node:
    def conv(y: Node, width: int, kernel: int, stride: int, suffix: str) -> Node:
        if kernel == 3:
            y = layers().ZeroPadding2D(1, name=f"{name}_pad{suffix}")(y)
        y = layer(
            width,
            kernel,
            strides=stride,
            use_bias=False,
            kernel_initializer="he_normal",
            kernel_regularizer=_decay(),
            name=f"{name}_conv{suffix}",
        )(y)
        return group_norm(y, model, f"{name}_norm{suffix}", _WIDE_GROUPS)

    shortcut = x
    if stride != 1 or x.shape[-1] != 4 * filters:
        shortcut = conv(x, 4 * filters, 1, stride, "0")
    x = layers().ReLU(name=f"{name}_relu1")(conv(x, filters, 1, 1, "1"))
    x = layers().ReLU(name=f"{name}_relu2")(conv(x, filters, 3, stride, "2"))
    x = conv(x, 4 * filters, 1, 1, "3")
    return layers().ReLU(name=f"{name}_relu3")(joined(x, shortcut, model, name, _WIDE_GROUPS))


@backbone("resnet50")
@backbone("resnet50_ws")
def resnet50(x: Node, model: ModelConfig) -> Node:
    """ResNet-50 v1.5 with GroupNorm(32): 23,770,304 parameters at RGB, 128.

    As in the paper's code, convolutions and the dense layer add `1e-4 x sum of squares` to the
    local loss.
    """
    import keras

    conv = convolution(model, "plain" if model.backbone.endswith("_ws") else "none")
    x = layers().ZeroPadding2D(3, name="stem_pad")(x)
    x = conv(
        64,
        7,
        strides=2,
        use_bias=False,
        kernel_initializer="he_normal",
        kernel_regularizer=_decay(),
        name="stem_conv",
    )(x)
    x = layers().ReLU(name="stem_relu")(group_norm(x, model, "stem_norm", _WIDE_GROUPS))
    x = layers().ZeroPadding2D(1, name="stem_pool_pad")(x)
    x = layers().MaxPooling2D(3, strides=2, name="stem_pool")(x)
    for stage, (filters, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=2):
        for index in range(1, count + 1):
            stride = 2 if stage > 2 and index == 1 else 1
            x = _bottleneck(x, model, conv, filters, stride, f"stage{stage}_{index}")
    return embedding(
        layers().GlobalAveragePooling2D(name="pool")(x),
        model,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        kernel_regularizer=_decay(),
        bias_regularizer=_decay(),
    )
