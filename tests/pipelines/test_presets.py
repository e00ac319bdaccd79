"""What ships as a preset can be run and released as it stands."""

from pathlib import Path

import pytest

import fedemb.pipelines
from fedemb.foundation.canonical_json import canonical_json
from fedemb.ledger import series_of, terms_of
from fedemb.ledger.budget import Charge, spent
from fedemb.pipelines.run.load_config import load_config, preset_names
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.registry import plan_mechanism
from tests.kit.cli import fedemb as command

FOLDER = Path(fedemb.pipelines.__file__).parent / "configs"
RELEASES = [
    path.stem
    for path in sorted(FOLDER.glob("*.yaml"))
    if load_config(path.stem, ()).purpose == "release"
]


@pytest.mark.parametrize("name", RELEASES)
def test_first_run_of_each_release_preset_fits_its_cap_and_delta(name):
    """The ledger adds runs up at one Rényi order, which costs more than the PLD of a single run."""
    config = load_config(name, ())
    plan = plan_mechanism(config)
    event = canonical_json(event_to_json(plan.event()))
    charge = Charge(event, plan.relation.name, plan.rounds, plan.rounds)
    price = spent(terms_of(config, series_of(config, plan)), [charge])
    assert price.epsilon <= config.policy.epsilon_cap
    assert config.policy.delta <= config.policy.users_lower_bound**-1.1, "the gate would deny it"


def test_presets_are_listed_with_one_line_each():
    lines = command("config", "presets").splitlines()
    assert [line.split()[0] for line in lines] == preset_names()
    assert all(len(line.split()) > 4 and line.endswith((".", "?")) for line in lines)
