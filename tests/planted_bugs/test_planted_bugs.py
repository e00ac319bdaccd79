"""Every planted bug turns its layer red; the sound system turns none."""

import pytest
from faults import FAULTS
from layers import LAYERS, System

from tests.kit.privacy_worlds import make_plan

PLAN = {"rounds": 400, "noise_multiplier": 2.0, "virtual_clients": 30, "sampling_probability": 0.4}


def sound(**changes) -> System:
    return System(make_plan(**PLAN, **changes))


@pytest.mark.planted_bug
@pytest.mark.parametrize("layer", LAYERS)
def test_the_sound_system_is_green_in_every_layer(layer):
    assert LAYERS[layer](sound()) == []


@pytest.mark.parametrize(
    ("fault", "layer"),
    [
        pytest.param(fault, layer, marks=pytest.mark.planted_bug(number), id=fault.__name__)
        for number, fault, layer in FAULTS
    ],
)
def test_a_planted_bug_turns_its_layer_red(fault, layer):
    problems = LAYERS[layer](fault(sound()))
    assert problems
    assert not any("this test saw nothing" in problem for problem in problems)
