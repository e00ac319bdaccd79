"""A training is paid for once and measured as often as wanted; nothing else may change in a run."""

import json

import pytest

from fedemb.config import FREE_SECTIONS, RunConfig
from fedemb.config.run import config_digest
from fedemb.errors import ConfigError, GateDenied, InputError, LedgerError, PlanMismatch
from fedemb.foundation.section import Section
from fedemb.pipelines.graph import build_pipeline
from fedemb.pipelines.run.directory import RunDirectory, RunState
from fedemb.pipelines.run.local import changed_config, reused_paths, reused_steps
from fedemb.pipelines.steps import PIPELINE
from fedemb.runtime.step import declared
from tests.kit.pipeline_runs import honest_run


class _Changed(Section):
    setting: int = 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_configuration_digest_covers_all_sections_except_the_free_ones():
    config = honest_run.config()
    whole = config_digest(config)
    other = {name: config.model_copy(update={name: _Changed()}) for name in RunConfig.model_fields}
    for name, changed in other.items():
        same = config_digest(changed) == whole
        assert same == (name in {"evaluation", "audit", "release", "storage"}), name
    for name in FREE_SECTIONS:
        assert config_digest(other[name], name) != config_digest(config, name)


def test_configuration_digest_depends_on_the_backend():
    """The plan says it too (`check_plan`); a digest that did not would leave it at that."""
    config = honest_run.config()
    other = config.updated({"training.backend": "jax"})
    assert config_digest(other) != config_digest(config)


@pytest.fixture
def run(tmp_path):
    """A run directory whose steps have written something, up to the audit."""
    made = RunDirectory.create(tmp_path / "runs", "one", honest_run.config())
    _finish(made, PIPELINE.steps[:7])
    return made


def _finish(run, steps):
    for step in steps:
        folder = run.public / "fedemb-1" / step.replace("_", "-")
        folder.mkdir(parents=True, exist_ok=True)
        for name in declared(step).files:
            (folder / name).write_text("{}")
    run.write_state(RunState(seconds=dict.fromkeys(steps, 1.0)))


@pytest.mark.parametrize(
    ("finished", "taken"),  # so each step that reads a section that may change runs again
    [
        ("", ""),
        ("plan", ""),
        ("plan pretrain reserve", "pretrain"),
        ("plan reserve partition", ""),
        ("plan pretrain partition", "pretrain"),
        ("plan pretrain reserve partition train", "plan pretrain reserve partition train"),
        ("plan pretrain reserve partition train audit", "plan pretrain reserve partition train"),
    ],
)
def test_resumed_run_reuses_partition_and_training_and_runs_the_rest(run, finished, taken):
    names = {name.partition("_")[0]: name for name in PIPELINE.steps}
    _finish(run, [names[verb] for verb in finished.split()])
    assert reused_steps(run, None) == tuple(names[verb] for verb in taken.split())


def test_resume_from_a_step_reuses_the_outputs_of_earlier_steps(run):
    taken = reused_steps(run, "evaluate_model")
    assert taken == PIPELINE.steps[:5]
    paths = reused_paths(run, taken)
    assert paths["train_model"] == {"model": str(run.output("model"))}
    run.output("model").unlink()
    with pytest.raises(InputError, match="--from train_model"):
        reused_paths(run, taken)


@pytest.mark.parametrize(
    ("start", "words"),
    [("gate_release", "account_privacy has not finished"), ("gate", "Unknown step")],
)
def test_resume_step_must_exist_with_its_predecessors_done(run, start, words):
    with pytest.raises(InputError, match=words):
        reused_steps(run, start)


def test_evaluation_may_change_and_the_configuration_before_is_kept(run):
    before = run.config()
    changed = changed_config(run, ["evaluation.bootstrap_samples=77"])
    assert config_digest(changed) == config_digest(before)
    run.change_config(changed)
    assert run.config().evaluation.bootstrap_samples == 77
    run.change_config(before)
    assert run.config() == before
    assert sorted(path.name for path in run.root.glob("config.*.yaml")) == [
        "config.1.yaml",
        "config.2.yaml",
    ]


def test_repeated_steps_get_the_current_configuration(run):
    changed = changed_config(run, ["evaluation.bootstrap_samples=77"])
    run.change_config(changed)
    paths = reused_paths(run, reused_steps(run, "evaluate_model"))
    tasks = build_pipeline(PIPELINE, "one", paths).pipeline_spec.root.dag.tasks
    assert "plan-privacy" not in tasks
    told = tasks["evaluate-model"].inputs.parameters["config"].runtime_value.constant
    assert RunConfig.model_validate_json(told.string_value) == changed


@pytest.mark.parametrize(
    "override",
    ["training.seed=9", "mechanism.rounds=7", "policy.delta=2e-5", "data.source.uri=other"],
)
def test_changing_a_reserved_section_on_resume_is_refused(run, override):
    section = override.partition(".")[0]
    with pytest.raises(ConfigError, match=f"reserved for another {section}. Change only"):
        changed_config(run, [override, "evaluation.bootstrap_samples=77"])


def test_release_of_the_same_version_is_refused(run):
    folder = run.public / "fedemb-1" / "release-model"
    folder.mkdir(parents=True)
    (folder / "release").write_text(json.dumps({"name": "glyphs", "version": "1.0"}))
    with pytest.raises(ConfigError, match=r"has released glyphs 1\.0"):
        changed_config(run, ["evaluation.bootstrap_samples=77"])
    other = ["evaluation.bootstrap_samples=77", "release.version=v2"]
    assert changed_config(run, other).release.version == "v2"


def test_resume_with_another_ledger_is_refused(run, tmp_path):
    """Another one, with other keys, would charge it a second time."""
    runs = (honest_run.start(tmp_path / name) for name in ("one", "other"))
    one, other = (each.do("plan pretrain reserve") for each in runs)
    run.output("reservation").write_bytes((one.root / honest_run.FILES["reservation"]).read_bytes())
    assert changed_config(run, [f"storage.ledger={one.ledger_uri}"])  # moved, with its records
    with pytest.raises(LedgerError):
        changed_config(run, [f"storage.ledger={other.ledger_uri}"])


# ---- the gate -----------------------------------------------------------------------------------


def _again(run, **changes):
    """Measures, accounts and judges the trained model of a run with another configuration."""
    run.config = run.config.updated(changes)
    run.do("measure account gate")


def test_same_model_is_measured_and_released_again_without_a_charge(tmp_path):
    run = honest_run.start(tmp_path).until_release()
    _again(run, **{"evaluation.bootstrap_samples": 77, "release.version": "1.1"})
    assert run.do_release()["version"] == "1.1"
    assert run.problems() == []
    kinds = [record.kind for record in run.ledger().chain.records]
    assert kinds == ["policy", "reserve", "bind", "commit", "release", "release"]


@pytest.mark.parametrize(
    "changes",
    [{"training.seed": 9}, {"training.server.learning_rate": 0.123}, {"model.channels": 3}],
)
def test_resume_rejects_a_changed_training_configuration(tmp_path, changes):
    run = honest_run.start(tmp_path).until_gate()
    run.config = run.config.updated(changes)
    run.do_measure()
    with pytest.raises(GateDenied, match="made for another configuration"):
        run.do_gate()
    with pytest.raises(PlanMismatch, match="made for another configuration"):
        run.do_account()
