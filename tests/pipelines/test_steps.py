"""A step is declared once, with its logic; everything else follows, for a new step too."""

import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from kfp import dsl

import fedemb.steps
from fedemb.documents.artifacts import Noised, Public
from fedemb.documents.evidence import read_evidence
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.foundation.document import read
from fedemb.pipelines import steps
from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images
from fedemb.pipelines.dp_fedemb import DP_FEDEMB
from fedemb.pipelines.graph import build_pipeline
from fedemb.reports import lineage
from fedemb.runtime.step import PLACEHOLDER_IMAGES, Rights, declared, leading_to, step
from tests.docs import declared as declared_files
from tests.kit.pipeline_runs import honest_run

REPOSITORY = Path(__file__).parents[2]
TOY = """
import json

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(image="light", private=False, outputs={"toys": Public}, rights=Rights(ledger="read"))
def count_toys(
    config: str, ledger: str, model: dsl.Input[dsl.Model], toys: dsl.Output[dsl.Artifact]
):
    'Counts the rounds of the model.'
    from fedemb.runtime.step import step_process
    from fedemb.steps.count_toys import run

    with step_process("count_toys", locals()) as context:
        toys.metadata["rounds"] = run(context)


def run(context):
    rounds = len((context.artifacts.model / "rounds.jsonl").read_text().splitlines())
    assert rounds <= context.config.mechanism.rounds
    context.artifacts.toys.write_text(json.dumps({"rounds": rounds}))
    return rounds
"""


def test_files_made_of_the_declarations_are_up_to_date(request):
    for path, text in declared_files.generated(REPOSITORY).items():
        if request.config.getoption("--force-regen"):
            path.write_text(text)
        assert path.read_text() == text, "run `make docs-reference`"


def test_every_module_of_a_step_is_declared_and_in_a_pipeline():
    found = {path.stem for path in (REPOSITORY / "components/fedemb/steps").glob("[a-z]*.py")}
    assert found == set(steps.all_steps())


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The file and the one entry that make a new step: all that is done here to add it."""
    (tmp_path / "count_toys.py").write_text(TOY)
    names = list(DP_FEDEMB.steps)
    names.insert(names.index("audit_privacy"), "count_toys")
    pipeline = replace(DP_FEDEMB, name="with-toys", steps=tuple(names))
    monkeypatch.setattr(fedemb.steps, "__path__", [*fedemb.steps.__path__, str(tmp_path)])
    monkeypatch.setattr(steps, "PIPELINES", (*steps.PIPELINES, pipeline))
    steps.all_steps.cache_clear()
    yield pipeline
    steps.all_steps.cache_clear()


@pytest.mark.parametrize("profile", ["cpu", "gpu", "tpu"])
def test_new_step_compiles_under_every_rule_without_another_file(toy, profile, tmp_path):
    images = parse_images([f"{name}=r.example/x@sha256:{'a' * 64}" for name in PLACEHOLDER_IMAGES])
    path = tmp_path / "pipeline.yaml"
    compile_pipeline(path, profile=profile, images=images, pipeline=toy)
    spec, platform = yaml.safe_load_all(path.read_text())
    task = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]["count-toys"]
    assert not task["cachingOptions"].get("enableCache")
    assert task["dependentTasks"] == ["plan-privacy", "train-dp-fedemb"]
    assert task["taskInfo"]["name"] == "Count toys"
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    labels = executors["exec-count-toys"]["podMetadata"]["labels"]
    assert labels == {"fedemb.dev/step": "count-toys"}


def test_new_step_has_its_rights_row_arrows_and_publication(toy):
    assert steps.rights_of_groups()["count"].ledger == "read"
    assert "| Counts the rounds of the model | light |" in declared_files.steps_table()
    assert toy.after()["count_toys"] == ("train_dp_fedemb",)
    assert toy.published()["count_toys"] == {"toys": Public}


def test_new_step_runs_from_its_component(toy, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "rounds.jsonl").write_text("{}\n" * 3)
    model, toys = (
        SimpleNamespace(path=str(tmp_path / name), metadata={}) for name in ("model", "toys")
    )
    config = honest_run.config().model_dump_json()
    function = declared("count_toys").component.python_func
    function(config=config, ledger="gs://ledger", model=model, toys=toys)
    assert json.loads((tmp_path / "toys").read_text()) == {"rounds": 3} == toys.metadata


@pytest.mark.planted_bug(21)
def test_metadata_of_artifacts_is_the_golden_one(file_regression):
    """Kubeflow keeps it where every user of the project reads: each value was reviewed."""
    lines = []
    for name, found in steps.all_steps().items():
        source = textwrap.dedent(inspect.getsource(found.component.python_func))
        for node in ast.walk(ast.parse(source)):
            said = ast.unparse(node) if isinstance(node, ast.Assign | ast.Expr) else ""
            if ".metadata" in said or ".log_" in said:
                lines.append(f"{name}: {said}")
    assert len(lines) > 10
    path = REPOSITORY / "tests" / "golden" / "metadata.txt"
    file_regression.check("\n".join(sorted(lines)) + "\n", fullpath=path)


def test_input_that_nobody_gives_or_two_give_is_refused():
    unfounded = replace(DP_FEDEMB, steps=("plan_privacy", "partition_users"))
    with pytest.raises(ValueError, match=r"reads reservation.*write: \[\]"):
        build_pipeline(unfounded)
    twice = replace(DP_FEDEMB, steps=("plan_privacy", "plan_privacy", "reserve_budget"))
    with pytest.raises(ValueError, match="Make exactly one step write it"):
        build_pipeline(twice)


def test_steps_of_one_service_account_declare_the_same_rights(monkeypatch):
    train = declared("train_dp_fedemb")
    other = replace(train, name="train_otherwise", rights=Rights(keys={"policy": "read"}))
    monkeypatch.setattr(steps, "all_steps", lambda: {"a": train, "b": other})
    with pytest.raises(ValueError, match="must declare the same rights"):
        steps.rights_of_groups()


def test_output_without_a_kind_and_unknown_parameter_are_refused():
    def look_around(config: str):
        """Looks."""

    assert step(image="light", outputs={})(look_around).private, "what is left out is careful"
    with pytest.raises(TypeError, match="say the kind of each"):
        step(image="light", outputs={"model": Noised})(look_around)

    def look_away(password: str):
        """Looks."""

    with pytest.raises(TypeError, match="which no context has"):
        step(image="light", outputs={})(look_away)

    def look_back(status: dsl.PipelineTaskFinalStatus):
        """Looks."""

    with pytest.raises(TypeError, match="have no rights"):
        step(image="light", outputs={}, rights=Rights(ledger="read"))(look_back)


def test_only_what_is_public_is_cached_and_what_reads_users_is_private():
    for found in steps.all_steps().values():
        rights = found.rights.private
        users = [name for name in ("users", "evaluation") if rights.get(name) in ("read", "write")]
        assert found.private == bool(users), found.name
        careful = users or found.rights.input != ("public",) or found.rights.ledger != "none"
        assert not (found.cached and careful), found.name


@pytest.mark.parametrize("pipeline", steps.PIPELINES, ids=lambda pipeline: pipeline.name)
def test_a_start_that_cannot_be_made_or_imported_ends_the_run_before_the_charge(pipeline):
    assert "pretrain_public" in pipeline.ancestors()["reserve_budget"]


@pytest.mark.parametrize("task", ["embedding", "classification"])
def test_what_leads_to_a_release_is_the_whole_pipeline_of_its_task(task):
    pipeline = next(item for item in steps.PIPELINES if item.name == lineage.PIPELINES[task])
    names = [step.name for step in leading_to("release_model", task)]
    assert sorted(names) == sorted(pipeline.steps)
    for name, givers in pipeline.givers().items():
        assert {names.index(giver) < names.index(name) for giver in givers.values()} <= {True}


def test_lineage_follows_from_the_declarations(tmp_path):
    run = honest_run.start(tmp_path).until_gate()
    report = read(run.report, PrivacyReport)
    told = lineage.steps_of(
        read_evidence(run.config, run.artifacts),
        leading_to("release_model", "embedding"),
        report,
        verdict="b" * 64,
    )
    by_name = {item.step: item for item in told}
    assert by_name["plan_privacy"].inputs == {"policy": None}
    assert set(by_name["partition_users"].inputs) == {"raw_images", "public_images", "reservation"}
    assert set(by_name["train_dp_fedemb"].outputs) == {"model", "rounds"}
    assert by_name["release_model"].outputs == {"release": None}
    assert by_name["gate_release"].outputs == {"verdict": "b" * 64}
    given = dict.fromkeys([*lineage.SOURCES.values(), "policy"])
    given["ledger_head"] = report.body.cumulative.ledger_head
    for item in told:
        for name, digest in item.inputs.items():
            assert given[name] == digest, (item.step, name)  # an earlier step gave it, and this
        assert all(item.outputs.values()) or item.step == "release_model"
        given |= item.outputs


@pytest.mark.long
def test_declarations_are_known_in_a_pod_too():
    """There kfp can run a component and not make one; a step must still know what it is."""
    code = (
        "from fedemb.runtime.step import declared, step_process\n"
        "for name in ('plan_privacy', 'train_dp_fedemb', 'show_outcome'):\n"
        "    with step_process(name, {}): pass\n"
        "print(declared('train_dp_fedemb').private, sorted(declared('gate_release').outputs))"
    )
    environment = {**os.environ, "_KFP_RUNTIME": "true"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("True ['lineage', 'verdict', 'verdict_page']\n"), done.stderr
