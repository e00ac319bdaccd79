"""A step is declared once, with its logic; everything else follows, for a new step too."""

import ast
import inspect
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from kfp import dsl

from fedemb.documents.artifacts import Noised
from fedemb.pipelines import steps
from fedemb.pipelines.graph import build_pipeline
from fedemb.pipelines.steps import PIPELINE
from fedemb.reports import lineage
from fedemb.runtime.step import Rights, leading_to, step
from tests.docs import declared as declared_files
from tests.kit.process import python

REPOSITORY = Path(__file__).parents[2]


def test_files_made_of_the_declarations_are_up_to_date(request):
    for path, text in declared_files.generated(REPOSITORY).items():
        if request.config.getoption("--force-regen"):
            path.write_text(text)
        assert path.read_text() == text, "run `make docs-reference`"


def test_every_module_of_a_step_is_declared_and_in_a_pipeline():
    found = {path.stem for path in (REPOSITORY / "components/fedemb/steps").glob("[a-z]*.py")}
    assert found == set(steps.all_steps())


@pytest.mark.planted_bug(21)
def test_metadata_of_artifacts_matches_the_golden_file(file_regression):
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


@pytest.mark.parametrize("given", [{}, {"reservation": "x", "model": "y"}])
def test_step_is_passed_each_of_its_inputs_and_nothing_else(given):
    def flow(run):
        config = run("plan_privacy")["config"]
        run("partition_users", config=config, **given)

    with pytest.raises(TypeError, match=r"missing 1 required|unexpected keyword"):
        build_pipeline(replace(PIPELINE, flow=flow))
    for found in PIPELINE.declared():
        assert PIPELINE.producers()[found.name].keys() - {"config"} == set(found.inputs)


def test_each_step_has_a_service_account_of_its_own():
    assert len(steps.rights_of_groups()) == len(steps.all_steps())


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


def test_only_public_steps_are_cached_and_steps_that_read_users_are_private():
    for found in steps.all_steps().values():
        rights = found.rights.private
        users = [name for name in ("users", "evaluation") if rights.get(name) in ("read", "write")]
        assert found.private == bool(users), found.name
        careful = users or found.rights.input != ("public",) or found.rights.ledger != "none"
        assert not (found.cached and careful), found.name


def test_failed_backbone_import_ends_the_run_before_the_charge():
    assert "pretrain_public" in PIPELINE.ancestors()["reserve_budget"]


def test_every_step_leads_to_the_release():
    assert PIPELINE.name == lineage.PIPELINE
    names = [step.name for step in leading_to("release_model")]
    assert sorted(names) == sorted(PIPELINE.steps)
    for name, producers in PIPELINE.producers().items():
        assert {names.index(giver) < names.index(name) for giver in producers.values()} <= {True}


@pytest.mark.long
def test_step_declarations_exist_without_kfp():
    """There kfp can run a component and not make one; a step must still know what it is."""
    code = (
        "from fedemb.runtime.step import declared, step_process\n"
        "for name in ('plan_privacy', 'train_model', 'show_outcome'):\n"
        "    with step_process(name, {}): pass\n"
        "print(declared('train_model').private, sorted(declared('gate_release').outputs))"
    )
    said = python("-c", code, env={"_KFP_RUNTIME": "true"})
    assert said.endswith("True ['lineage', 'verdict', 'verdict_page']\n")
