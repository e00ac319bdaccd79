"""The mechanism plan: what it holds, refuses and costs."""

import itertools
import json
import math
from contextlib import nullcontext
from typing import Literal

import pytest
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import dp_event as dpe

from fedemb.config import RunConfig
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import ArtifactError, ConfigError, GateDenied, Refused
from fedemb.privacy import group_mechanisms as tree_sensitivity
from fedemb.privacy import planning as calibration
from fedemb.privacy.accounting import price, supports
from fedemb.privacy.guarantee import PrivacyGuarantee, event_from_json, repeated
from fedemb.privacy.mechanism import MechanismPlan
from fedemb.privacy.planning import project, with_target_epsilon
from fedemb.privacy.registry import MECHANISMS, plan_from_json, plan_mechanism
from fedemb.privacy.sampling import sample
from fedemb.privacy.section import MechanismConfig
from fedemb.release.plan import check_composition, document
from fedemb.reports.privacy_text import PARTICIPANTS, participants
from fedemb.runtime.step_context import StepContext
from fedemb.steps import gate_release
from fedemb.steps.plan_privacy import run
from fedemb.training.noise_warnings import warnings
from tests.kit.cli import fedemb
from tests.kit.pipeline_runs import honest_run, training_run
from tests.kit.privacy_worlds import KINDS, ROOT, World, make_plan


def run_config(mechanism: dict, **policy) -> RunConfig:
    return RunConfig.model_validate(
        {
            "purpose": "simulation",
            "data": {"source": {"uri": "builtin"}},
            "partition": {"virtual_clients": 1000},
            "mechanism": mechanism,
            "policy": {"users_lower_bound": 30_000, "delta": 1e-5, "epsilon_cap": 8} | policy,
        }
    )


GROUP = {
    "kind": "group_poisson_gaussian",
    "rounds": 50,
    "noise_multiplier": 4.0,
    "sampling_probability": 0.05,
}


@pytest.mark.parametrize("kind", KINDS)
def test_plan_survives_json_and_its_digest_names_it(kind):
    plan = make_plan(kind)
    value = json.loads(json.dumps(plan.to_json()))
    assert plan_from_json(value) == plan
    assert plan_from_json(value).digest == plan.digest
    assert make_plan(kind, noise_multiplier=1.5).digest != plan.digest


def test_malformed_plan_json_is_refused():
    value = make_plan().to_json()
    for bad in (
        {**value, "seed": 1},
        {key: item for key, item in value.items() if key != "rounds"},
        {**value, "schema": "fedemb/mechanism_plan/1"},
        {**value, "kind": "laplace"},
        {key: item for key, item in value.items() if key != "unit"},
        {**value, "rounds": float(value["rounds"]) + 0.5},
        {**value, "rounds": True},
        {**value, "l2_norm_clip": "1.0"},
        {**value, "another_clip": {"quantile": 0.5}},
        {**value, "rounds": "many"},
    ):
        with pytest.raises(ArtifactError):
            plan_from_json(bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("field", ["noise_multiplier", "l2_norm_clip", "sampling_probability"])
def test_nonfinite_or_negative_mechanism_numbers_are_refused(field, bad):
    with pytest.raises(ConfigError, match=field):
        make_plan(**{field: bad})


def test_probability_overflow_and_noise_bounds_are_refused():
    with pytest.raises(ConfigError, match="sampling_probability"):
        make_plan(sampling_probability=1.5)
    with pytest.raises(ConfigError, match="overflow"):
        make_plan(virtual_clients=2**30)
    with pytest.raises(ConfigError, match="noise_multiplier: input should be less than or equal"):
        make_plan(noise_multiplier=2.0**40)
    with pytest.raises(ConfigError, match="overflow"):
        # Within the limit, on a grid too fine for it.
        make_plan(noise_multiplier=1e6, grid_bits=40)
    with pytest.raises(ConfigError, match="grid_bits"):
        make_plan(grid_bits=31)
    with pytest.raises(ConfigError, match="set 0 or at least"):
        make_plan(noise_multiplier=1e-4)


@pytest.mark.parametrize("kind", ["tree_aggregation"])
def test_correlated_noise_reserves_more_integer_bits(kind):
    """Rows of it add up draws of many rounds, so what just fits otherwise is refused."""
    loud = 1e6
    assert make_plan(noise_multiplier=loud).private
    with pytest.raises(ConfigError, match="overflow"):
        make_plan(kind, noise_multiplier=loud)


@pytest.mark.planted_bug(18)
@pytest.mark.parametrize("kind", ["tree_aggregation"])
def test_impossible_participation_of_tree_aggregation_is_refused(kind):
    with pytest.raises(ConfigError, match="groupings"):
        make_plan(kind, groupings=2)
    with pytest.raises(ConfigError, match="clients_per_round=8 exceeds"):
        make_plan(kind, virtual_clients=7)
    for groups, turns in ((40, (5, 4)), (39, (4, 5)), (8, (1, 20))):
        plan = make_plan(kind, virtual_clients=groups)
        assert (plan.min_separation, plan.max_participations) == turns


@pytest.mark.parametrize("kind", KINDS)
def test_renyi_release_policy_refuses_a_mechanism_without_rdp(kind):
    """Otherwise the run would train its public backbone and be refused by the ledger."""
    alone = kind == "capped_image_poisson"
    cases = [("renyi", "release"), ("planned", "release"), ("renyi", "simulation")]
    for composition, purpose in cases:
        terms = {
            "policy.composition": composition,
            "purpose": purpose,
            "tuning": {"data": "public", "method": "on glyphs"},
        }
        config = run_config(GROUP).updated(terms)
        refused = alone and (composition, purpose) == cases[0]
        with pytest.raises(ConfigError, match="planned") if refused else nullcontext():
            check_composition(config, make_plan(kind))


def test_mechanism_events_match_the_sensitivity_table():
    """docs/privacy/sensitivity.md#what-one-user-can-change, one line each."""
    group = make_plan()
    assert group.relation is Relation.REPLACE_ONE
    assert group.round_event == dpe.PoissonSampledDpEvent(0.25, dpe.GaussianDpEvent(1.0))
    doubled = dpe.PoissonSampledDpEvent(0.25, dpe.GaussianDpEvent(0.5))
    assert group.conservative_event() == dpe.SelfComposedDpEvent(doubled, 20)
    tree = make_plan("tree_aggregation")
    assert tree.round_event == dpe.UnsupportedDpEvent()
    assert tree.event() == dpe.GaussianDpEvent(1 / (2 * tree.matrix_sensitivity(20)))
    one = dpe.GaussianDpEvent(1.0)
    times = dpe.SelfComposedDpEvent
    alone = {
        make_plan("poisson_gaussian"): times(dpe.PoissonSampledDpEvent(0.25, one), 20),
        make_plan("capped_image_poisson", images_per_user=2): times(
            dpe.MixtureOfGaussiansDpEvent(1.0, [0.0, 1.0, 2.0], [0.5625, 0.375, 0.0625]), 20
        ),
    }
    for plan, event in alone.items():
        assert (plan.relation, plan.event()) == (Relation.ADD_OR_REMOVE_ONE, event)
    assert make_plan(noise_multiplier=0.0).event() == times(dpe.NonPrivateDpEvent(), 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_run_costs_no_more_and_no_run_costs_nothing(kind):
    plan = make_plan(kind, noise_multiplier=12.0)
    assert plan.event(0) == dpe.NoOpDpEvent()
    assert plan.event(plan.rounds) == plan.event()
    quickest = "rdp" if supports(plan.event(), plan.relation, "rdp") else "auto"
    half, full = (
        price(event, plan.relation, 1e-6, quickest).epsilon
        for event in (plan.event(plan.rounds // 2), plan.event())
    )
    assert half <= full
    assert 0 < full < math.inf
    with pytest.raises(ValueError, match="rounds"):
        plan.event(plan.rounds + 1)
    with pytest.raises(ValueError, match="rounds"):
        plan.event(-1)


def test_normalizer_is_a_public_constant():
    assert make_plan().normalizer == 0.25 * 40
    assert make_plan("tree_aggregation").normalizer == 8


# ---- correlated noise ---------------------------------------------------------------------------


def brute_force_tree(rounds: int, gap: int, most: int, restart: int) -> int:
    """Largest sum of squared node counts over all participation patterns, one by one."""
    size = restart or rounds
    best = 0

    def value(pattern):
        total = 0
        for start in range(0, rounds, size):
            length = min(size, rounds - start)
            level = 1
            while level <= length:
                for node in range(length // level):
                    low = start + node * level
                    total += sum(low <= t < low + level for t in pattern) ** 2
                level *= 2
        return total

    def extend(pattern):
        nonlocal best
        best = max(best, value(pattern))
        if len(pattern) < most:
            for t in range(pattern[-1] + gap if pattern else 0, rounds):
                extend([*pattern, t])

    extend([])
    return best


@pytest.mark.parametrize(
    ("rounds", "gap", "most"), [(8, 3, 3), (11, 2, 4), (13, 5, 2), (7, 1, 7), (9, 9, 2), (6, 20, 3)]
)
def test_tree_sensitivity_is_the_maximum_over_all_patterns(rounds, gap, most):
    squared = tree_sensitivity.sensitivity(rounds, gap, most) ** 2
    assert squared == pytest.approx(brute_force_tree(rounds, gap, most, 0))


@pytest.mark.parametrize(("rounds", "gap", "most", "restart"), [(12, 3, 3, 5), (10, 4, 2, 4)])
def test_tree_sensitivity_with_restarts_is_an_upper_bound(rounds, gap, most, restart):
    squared = tree_sensitivity.sensitivity(rounds, gap, most, restart) ** 2
    exact = brute_force_tree(rounds, gap, most, restart)
    assert exact - 1e-9 <= squared <= 1.5 * exact


def test_tree_sensitivity_is_never_below_the_maximum_over_all_patterns():
    """The last tree may be shorter than the others, and one participation has a way of its own."""
    for rounds, gap, most, restart in itertools.product(
        range(1, 10), (1, 3), (1, 2, 3), (0, 2, 3, 5, 6)
    ):
        squared = tree_sensitivity.sensitivity(rounds, gap, most, restart) ** 2
        assert squared >= brute_force_tree(rounds, gap, most, restart) - 1e-9


def test_tree_sensitivity_of_published_runs():
    """DigiFace poster (S = 177) and the Gboard run (S = 79, zCDP 0.81)."""
    assert tree_sensitivity.sensitivity(800, 77, 11) ** 2 == pytest.approx(177)
    squared = tree_sensitivity.sensitivity(2000, 314, 6) ** 2
    assert squared == pytest.approx(79)
    assert squared / (2 * 7**2) == pytest.approx(0.81, abs=5e-3)


# ---- the step -----------------------------------------------------------------------------------


def test_step_writes_a_plan_whose_parts_agree(tmp_path):
    config = run_config(GROUP, certify_at=[300_000])
    artifacts = RunArtifacts(privacy_plan=tmp_path / "plan.json")
    returned = run(StepContext(artifacts, config=config, keys=str(tmp_path / "keys")))
    written = json.loads((tmp_path / "plan.json").read_text())
    assert returned.json == written
    plan = plan_from_json(written["plan"])
    assert plan == plan_mechanism(config)
    assert event_from_json(written["event"]) == plan.event()
    guarantee = PrivacyGuarantee.from_json(written["guarantee"])
    assert guarantee.epsilon < written["epsilon_rdp"]
    assert guarantee.epsilon < written["epsilon_conservative_2c"]
    (projection,) = written["projections"]
    assert (projection["simulated_at"], projection["population"]) == (30_000, 300_000)
    assert projection["delta"] < 1 / 300_000
    assert projection["epsilon"] < guarantee.epsilon
    assert document(config).content() == {k: v for k, v in written.items() if k != "signature"}


def test_delta_above_the_customary_bound_is_warned_about():
    risky = run_config(GROUP, delta=3e-5)
    assert "delta_above_customary" in warnings(risky)
    assert "above the customary" in warnings(risky)["delta_above_customary"]
    assert "delta_above_customary" not in warnings(run_config(GROUP, delta=1e-5))
    with pytest.raises(ValueError, match="users_lower_bound"):
        run_config(GROUP, delta=1e-4)


def test_more_virtual_clients_than_users_are_warned_about():
    """The noise is relative to a mean over clients; empty clients make it appear small."""
    as_many = run_config(GROUP, users_lower_bound=1000)
    assert "clients_mostly_empty" not in warnings(as_many)
    more = as_many.updated({"partition.virtual_clients": 1001})
    assert "1,001 exceeds the 1,000 users" in warnings(more)["clients_mostly_empty"]


def test_mostly_empty_rounds_are_warned_about():
    def found(**changes):
        return warnings(run_config({**GROUP, **changes}))

    clients = plan_mechanism(run_config(GROUP)).normalizer
    assert "rounds_mostly_empty" not in found()
    empty = found(sampling_probability=GROUP["sampling_probability"] * 0.9 / clients)
    assert "0.9 virtual clients" in empty["rounds_mostly_empty"]


def test_projection_keeps_the_noise_on_the_mean():
    plan = make_plan()
    scaled = plan.scaled(10, 10)
    assert scaled.noise_multiplier / scaled.normalizer == pytest.approx(
        plan.noise_multiplier / plan.normalizer
    )
    assert scaled.sampling_probability == plan.sampling_probability
    assert project(plan, 1000, 10_000).epsilon < price(plan.event(), plan.relation, 1e-5).epsilon


def test_calibration_hits_the_target_from_below():
    plan = make_plan(rounds=20, sampling_probability=0.02)
    found = with_target_epsilon(plan, 0.5, 1e-6)
    epsilon = price(found.event(), found.relation, 1e-6).epsilon
    assert 0.495 <= epsilon <= 0.5
    for target in (math.nan, 0.0, -1.0, math.inf):
        with pytest.raises(ConfigError, match="target_epsilon"):
            with_target_epsilon(plan, target, 1e-6)
    with pytest.raises(ConfigError, match="no noise to calibrate"):
        with_target_epsilon(make_plan(noise_multiplier=0.0), 2.0, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["capped_image_poisson"])
def test_mechanism_that_rdp_does_not_price_is_calibrated_too(kind):
    """With RDP, the search starts at the lowest possible value."""
    plan = make_plan(kind)
    assert not supports(plan.event(), plan.relation, "rdp")
    louder = plan.replaced(noise_multiplier=6.0)
    target = price(louder.event(), louder.relation, 1e-5).epsilon
    found = with_target_epsilon(plan, target, 1e-5)
    assert 0.98 * target <= price(found.event(), found.relation, 1e-5).epsilon <= target


@pytest.mark.parametrize("steep", [-1000.0, -1.5, 0.0])
@pytest.mark.parametrize("bend", [-0.3, 0.0, 0.3, 2.0])
@pytest.mark.parametrize("start", [0.004, 0.03, 0.4, 3.0])
def test_calibration_search_finds_nearly_the_least_sufficient_noise(start, bend, steep):
    """Of any curve that falls, and however wrong the first guess of its slope is."""
    for least in (0.07, 0.8331, 3.49, 41234.5):
        asked = []

        def excess(log_noise, least=least, asked=asked):
            asked.append(log_noise)
            apart = log_noise - math.log(least)
            return -apart - bend * math.expm1(apart) if bend > 0 else -apart * math.exp(bend)

        noise = calibration._least(excess, least * math.exp(start), steep)
        assert least <= noise <= least * 1.002
        assert len(asked) < 40


@pytest.mark.parametrize("kind", ["poisson_gaussian", "tree_aggregation"])
def test_noise_is_calibrated_for_all_planned_runs_together(kind):
    def together(plan):
        return price(repeated(plan.event(), 5), plan.relation, 1e-6, runs=5).epsilon

    found = with_target_epsilon(make_plan(kind, rounds=20), 3.0, 1e-6, runs=5)
    less = found.replaced(noise_multiplier=found.noise_multiplier / 1.003)
    assert together(found) <= 3.0 < together(less)


@pytest.mark.parametrize("target", [1e-9, 1e-5])
def test_calibration_ends_where_epsilon_is_zero_on_the_grid_of_losses(target):
    found = with_target_epsilon(make_plan(rounds=30, sampling_probability=0.1), target, 1e-5)
    assert price(found.event(), found.relation, 1e-5).epsilon <= target


def test_calibration_ends_below_the_grid_of_losses():
    plan = make_plan(rounds=20, sampling_probability=0.02)
    found = with_target_epsilon(plan, 1e-4, 1e-6)
    less = found.replaced(noise_multiplier=found.noise_multiplier / 1.05)
    least = price(less.event(), less.relation, 1e-6).epsilon
    assert price(found.event(), found.relation, 1e-6).epsilon <= 1e-4 < least
    with pytest.raises(ConfigError, match=r"no noise_multiplier up to 1e\+06"):
        with_target_epsilon(make_plan(rounds=10_000), 1e-6, 1e-9)


# ---- One mechanism is one class; no other module names it ----


class EveryoneConfig(MechanismConfig):
    """Every virtual client in every round."""

    kind: Literal["everyone"] = "everyone"


class Everyone(EveryoneConfig, MechanismPlan):
    """No sampling, fresh noise: a user moves one virtual client by 2C in every round."""

    section = EveryoneConfig
    proof = "a user moves one update by at most 2C, in every round"

    @property
    def normalizer(self):
        return float(self.virtual_clients)

    @property
    def chance(self):
        return 1.0

    @property
    def round_event(self):
        return dpe.GaussianDpEvent(self.noise_multiplier / 2)


TOY = {"kind": "everyone", "rounds": 3, "noise_multiplier": 60.0}


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """The entries of a new module: in the registry, and in the table of report text."""
    monkeypatch.setitem(MECHANISMS, "everyone", Everyone)
    monkeypatch.setitem(
        PARTICIPANTS, "everyone", lambda plan: "every virtual client in every round"
    )


def test_every_mechanism_has_report_text():
    assert PARTICIPANTS.keys() == MECHANISMS.keys()
    kinds = (kind for kind in MECHANISMS if kind != "everyone")
    assert all(participants(make_plan(kind)) for kind in kinds)


def test_a_new_mechanism_is_planned_by_the_command_line():
    words = ["--config", "quickstart", "--set", f"mechanism={json.dumps(TOY)}", "--json"]
    words += ["--set", "partition.virtual_clients=625"]
    found = json.loads(fedemb("plan", *words))
    fields = {"rounds": 3, "noise_multiplier": 60.0, "groupings": 1, "images_per_user": 4}
    ours = Everyone(virtual_clients=625, **fields)
    assert found["epsilon"] == price(ours.event(), ours.relation, found["delta"]).epsilon
    assert found["plan_sha"] == ours.digest
    assert "mechanism[everyone].noise_multiplier" in fedemb("config", "mechanism")


def test_registered_mechanism_is_charged_reported_and_allowed(tmp_path):
    run = honest_run.start(tmp_path / "run", mechanism=TOY).until_gate()
    assert run.ledger().state.attempts  # reserved and charged
    report = json.loads(run.report.read_text())
    assert report["mechanism"]["name"] == "everyone"
    assert "every virtual client in every round" in run.page.read_text()
    verdict = gate_release.run(run.context())
    assert verdict["allow"], verdict["reasons"]


def test_a_mechanism_without_a_proof_is_not_charged_and_the_gate_denies_it(tmp_path, monkeypatch):
    run = honest_run.start(tmp_path / "run", mechanism=TOY).until_gate()
    monkeypatch.setattr(Everyone, "proof", "")
    with pytest.raises(GateDenied, match="no proven guarantee"):
        gate_release.run(run.context())
    with pytest.raises(Refused, match=r"no proven guarantee.*Nothing was charged"):
        honest_run.start(tmp_path / "another", mechanism=TOY).until_gate()


@pytest.mark.long
def test_a_new_mechanism_trains(tmp_path):
    ready = training_run.prepare(tmp_path, training_run.config(mechanism=TOY))
    model = ready.train()
    assert model["rounds_run"] == 3
    lines = [json.loads(x) for x in (tmp_path / "model" / "rounds.jsonl").read_text().splitlines()]
    assert [line["clients_planned"] for line in lines] == [12.0] * 3
    assert lines[0]["event"] == {"type": "gaussian", "noise_multiplier": 30.0}
    clients = Everyone(rounds=3, noise_multiplier=60.0, virtual_clients=12, groupings=1)
    assert len(sample(clients, ROOT, 0, World(range(100), 12))) == 12


def test_a_kind_that_is_not_registered_is_refused(monkeypatch):
    plan = Everyone(rounds=3, noise_multiplier=60.0, virtual_clients=12, groupings=1).to_json()
    assert plan_from_json(plan).kind == "everyone"
    monkeypatch.delitem(MECHANISMS, "everyone")
    with pytest.raises(ArtifactError, match="'everyone', known are"):
        plan_from_json(plan)
    with pytest.raises(ValueError, match="mechanism"):
        RunConfig.model_validate({**training_run.config().model_dump(), "mechanism": TOY})
