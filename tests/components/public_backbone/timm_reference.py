"""Writes networks of timm with random weights, and their features of random images.

    .venv-timm/bin/python tests/components/public_backbone/timm_reference.py FOLDER

For each network: NAME.safetensors, NAME.pth (zip), NAME_old.pth (stream) and NAME.npz. The script
runs in an environment with PyTorch, which the product does not have.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from safetensors.torch import save_file

NETWORKS = {
    "resnet50-96": ("resnet50", 96),
    "vit_small-224": ("vit_small_patch16_224", 224),
    "vit_small-96": ("vit_small_patch16_224", 96),
    "dinov2_small-518": ("vit_small_patch14_dinov2", 518),
    "dinov2_small-140": ("vit_small_patch14_dinov2", 140),
    "mobilenetv3_large-96": ("mobilenetv3_large_100", 96),
    "convnext_tiny-96": ("convnext_tiny", 96),
}
"""Architecture and size in pixels: name in timm, size."""
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5,) * 3, (0.5,) * 3)


def _draw(state):
    """Draws each weight that timm leaves at a constant, so that all of them count."""
    random = torch.Generator().manual_seed(1)
    for name, weight in state.items():
        drawn = torch.rand(weight.shape, generator=random)
        if name.endswith(("running_var", "gamma")):
            weight.copy_(drawn + 0.3)
        elif weight.ndim == 1 and weight.is_floating_point():
            weight.copy_(drawn + 0.5 if name.endswith("weight") else 0.2 * (drawn - 0.5))
        elif name in ("pos_embed", "cls_token"):
            weight.copy_(drawn - 0.5)
    return state


def write(folder: Path, name: str) -> None:
    """Writes the files of one network."""
    function, size = NETWORKS[name]
    torch.manual_seed(0)
    net = timm.create_model(function, pretrained=False, num_classes=0).eval()
    state = _draw(net.state_dict())
    save_file({key: value.clone() for key, value in state.items()}, folder / f"{name}.safetensors")
    torch.save(state, folder / f"{name}.pth")
    torch.save(state, folder / f"{name}_old.pth", _use_new_zipfile_serialization=False)
    if "_small-" in name:
        from timm.models.vision_transformer import checkpoint_filter_fn

        net = timm.create_model(function, pretrained=False, num_classes=0, img_size=size).eval()
        net.load_state_dict(checkpoint_filter_fn(dict(state), net))
    images = np.random.default_rng(0).integers(0, 256, (2, size, size, 3)).astype(np.uint8)
    mean, deviation = HALF if name.startswith("vit") else IMAGENET
    pixels = ((images / 255 - np.array(mean)) / np.array(deviation)).astype(np.float32)
    with torch.no_grad():
        features = net(torch.tensor(pixels).permute(0, 3, 1, 2)).numpy()
    np.savez(folder / f"{name}.npz", images=images, features=features)


if __name__ == "__main__":
    for network in NETWORKS:
        write(Path(sys.argv[1]), network)
