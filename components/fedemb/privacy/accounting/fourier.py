"""Fourier transforms of real numbers in float64, with types: SciPy declares none."""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
from scipy import fft

Doubles = npt.NDArray[np.float64]
Spectrum = npt.NDArray[np.complex128]


def spectrum_of(values: Doubles) -> Spectrum:
    """Returns the coefficients `[points // 2 + 1]` of real values `[points]`."""
    return cast("Spectrum", fft.rfft(values))


def values_of(spectrum: Spectrum, points: int) -> Doubles:
    """Returns the real values `[points]` of coefficients `[points // 2 + 1]`."""
    return cast("Doubles", fft.irfft(spectrum, points))
