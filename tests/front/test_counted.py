"""How many files of the product it takes to add something: one, and a line where it is listed."""

from typing import Literal

import pytest
from dp_accounting import dp_event as dpe

import fedemb
from fedemb.errors import ConfigError
from fedemb.foundation.section import Probability
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.registry import MECHANISMS
from fedemb.privacy.section import NoisedConfig
from tests.kit.privacy_worlds import ROOT, World, make_plan


class HalvesConfig(NoisedConfig):
    """A field of its own, which no other mechanism has."""

    kind: Literal["halves"] = "halves"
    share: Probability
    """Chance of each virtual client."""


class Halves(HalvesConfig, MechanismPlan):
    section = HalvesConfig
    proof = "a user moves one update by at most 2C"
    weight: float

    @classmethod
    def derived(cls, section, numbers):
        return {"weight": section.share * numbers.virtual_clients}

    @property
    def normalizer(self):
        return self.weight

    def sample(self, round_key, round_index, index):
        from fedemb.privacy.sampling import sample_groups

        return sample_groups(self, self.share, round_key, round_index, index)

    @property
    def round_event(self):
        return dpe.GaussianDpEvent(self.noise_multiplier / 2)


def test_a_mechanism_is_one_module_and_a_line_of_the_registry(monkeypatch):
    """The world of the tests plans it as it plans itself: every test of all kinds takes it."""
    monkeypatch.setitem(MECHANISMS, "halves", Halves)
    plan = make_plan("halves", share=0.25, virtual_clients=20)
    assert (plan.share, plan.weight, plan.normalizer) == (0.25, 5.0, 5.0)
    assert len(plan.sampler(ROOT).sample(0, World(range(100), 20))) <= 20
    assert "(inf" not in str(fedemb.guarantee(plan, delta=1e-5))
    with pytest.raises(ConfigError, match="share"):
        make_plan("halves", share=2.0)
