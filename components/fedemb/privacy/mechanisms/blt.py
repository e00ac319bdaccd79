"""Buffered linear Toeplitz noise, for cohorts that cannot be sampled (arXiv 2408.08868)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from fedemb.errors import PlanMismatch
from fedemb.privacy.mechanisms.mechanism import Cohort, MechanismPlan, PublicNumbers
from fedemb.privacy.mechanisms.round_robin import RoundRobinConfig, RoundRobinPlan
from fedemb.privacy.mechanisms.section import MechanismConfig

if TYPE_CHECKING:
    from fedemb.privacy.randomness.keyed_noise import CorrelatedStream


class BltConfig(RoundRobinConfig):
    """Buffered linear Toeplitz noise: correlated, no sampling, bounded participation."""

    kind: Literal["blt"] = "blt"
    buffers: Annotated[int, Field(ge=1, le=8)] = 2
    """Noise buffers (d)."""


class Blt(BltConfig, RoundRobinPlan):
    """Correlated noise: the noise of a round partly cancels the noise of earlier rounds.

    jax-privacy optimizes the parameters during planning, which takes seconds to a minute. `check`
    recomputes all values that the guarantee depends on.
    """

    section = BltConfig

    blt_decay: tuple[float, ...] | None = None
    """Decay of each noise buffer, in (0, 1)."""
    blt_scale: tuple[float, ...] | None = None
    """Output scale of each noise buffer."""

    @override
    @classmethod
    def derived(cls, section: MechanismConfig, numbers: PublicNumbers) -> dict[str, object]:
        assert isinstance(section, BltConfig)
        from fedemb.privacy.randomness import toeplitz

        bounds = section.min_separation, section.max_participations
        decay, scale = toeplitz.optimise(section.rounds, *bounds, section.buffers)
        column = toeplitz.coefficients(decay, scale, section.rounds)
        return {
            "blt_decay": decay,
            "blt_scale": scale,
            "matrix_sensitivity": toeplitz.sensitivity(column, *bounds),
        }

    @override
    @classmethod
    def section_at(cls, cohort: Cohort, **options: int | None) -> dict[str, float]:
        return {
            **super().section_at(cohort, **options),
            "buffers": options.get("buffers") or cls.model_fields["buffers"].default,
        }

    @override
    def expected(self, section: MechanismConfig, numbers: PublicNumbers) -> MechanismPlan:
        """Returns the plan of the configuration with the decays and scales of this plan."""
        assert isinstance(section, BltConfig)
        if len(self.blt_decay or ()) != section.buffers:
            raise PlanMismatch(
                f"The privacy plan has {len(self.blt_decay or ())} noise buffers, but the "
                f"configuration has {section.buffers}. Run plan_privacy again."
            )
        return Blt(
            **section.model_dump(),
            virtual_clients=numbers.virtual_clients,
            groupings=numbers.groupings,
            unit=numbers.unit,
            blt_decay=self.blt_decay,
            blt_scale=self.blt_scale,
            matrix_sensitivity=self.matrix_sensitivity,
        )

    @override
    def check(self) -> None:
        from fedemb.privacy.randomness.toeplitz import check

        check(self.blt_decay, self.blt_scale)
        super().check()

    @override
    def noise_stream(self, size: int) -> CorrelatedStream:
        from fedemb.privacy.randomness.keyed_noise import BltStream, grid_scale

        return BltStream(self._decay, self._scale, grid_scale(self), size)

    @override
    def sensitivity_over(self, rounds: int) -> float:
        from fedemb.privacy.randomness import toeplitz

        column = toeplitz.coefficients(self._decay, self._scale, rounds)
        return toeplitz.sensitivity(column, self.min_separation, self.max_participations)

    @override
    def sensitivity(self, min_separation: int, max_participations: int) -> float:
        from fedemb.privacy.randomness import toeplitz

        column = toeplitz.coefficients(self._decay, self._scale, self.rounds)
        return toeplitz.sensitivity(column, min_separation, max_participations)

    @override
    def prefix_variance(self) -> float:
        import numpy as np

        from fedemb.privacy.randomness import toeplitz

        column = toeplitz.inverse_coefficients(self._decay, self._scale, self.rounds)
        # Prefix sums of C^-1 Z have the coefficients' running sums as weights.
        return float(np.cumsum(np.cumsum(column) ** 2).mean())

    @property
    def _decay(self) -> tuple[float, ...]:
        return self.blt_decay or ()

    @property
    def _scale(self) -> tuple[float, ...]:
        return self.blt_scale or ()

    @override
    def matrix(self) -> dict[str, float | None] | None:
        return {**(super().matrix() or {}), "buffers": len(self._decay)}
