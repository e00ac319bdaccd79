"""Every rule of the compiled pipeline, and that it notices the change it stands against."""

import copy
from pathlib import Path

import pytest
import yaml

from components.fedemb.errors import ConfigError
from pipelines.cluster import compile_pipeline, parse_images
from pipelines.compile_rules import RULES, violations
from pipelines.dp_fedemb import PUBLIC_STEPS, STEPS
from pipelines.run_index import AFTER

GOLDEN = Path(__file__).parents[1] / "golden"
IMAGE = "registry.example/fedemb@sha256:" + "a" * 64


@pytest.fixture(scope="module", params=["cpu", "gpu", "tpu"])
def compiled(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"
    compile_pipeline(path, profile=request.param, images=parse_images([IMAGE]))
    return list(yaml.safe_load_all(path.read_text()))


def _task(documents, name):
    return documents[0]["root"]["dag"]["tasks"][name]


def _cache_training(documents):
    _task(documents, "train-dp-fedemb")["cachingOptions"] = {"enableCache": True}


def _cache_gate(documents):
    _task(documents, "gate-release")["cachingOptions"] = {"enableCache": True}


def _cache_reserve(documents):
    _task(documents, "reserve-budget")["cachingOptions"] = {"enableCache": True}


def _cache_key(documents):
    _task(documents, "pretrain-public")["cachingOptions"]["cacheKey"] = "mine"


def _retry_training(documents):
    _task(documents, "train-dp-fedemb")["retryPolicy"] = {"maxRetryCount": 2}


def _retry_around_training(documents):
    spec = documents[0]
    tasks = spec["root"]["dag"]["tasks"]
    inner = {"train-dp-fedemb": tasks.pop("train-dp-fedemb")}
    spec["components"]["comp-group"] = {"dag": {"tasks": inner}}
    tasks["group"] = {
        "componentRef": {"name": "comp-group"},
        "retryPolicy": {"maxRetryCount": 1},
        "taskInfo": {"name": "group"},
    }


def _stale_import(documents):
    executors = documents[0]["deploymentSpec"]["executors"]
    executors["exec-importer"] = {"importer": {"artifactUri": {"constant": "gs://b/x"}}}


def _mutable_tag(documents):
    executors = documents[0]["deploymentSpec"]["executors"]
    executors["exec-gate-release"]["container"]["image"] = "registry.example/fedemb:latest"


def _secret_parameter(documents):
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    parameters["signing_secret"] = {"parameterType": "STRING"}


def _release_without_gate(documents):
    verdict = _task(documents, "release-model")["inputs"]["artifacts"]["verdict"]
    verdict["taskOutputArtifact"]["producerTask"] = "plan-privacy"


def _release_despite_gate(documents):
    _task(documents, "release-model")["triggerPolicy"] = {
        "strategy": "ALL_UPSTREAM_TASKS_COMPLETED"
    }


def _raw_output(documents):
    outputs = documents[0]["components"]["comp-train-dp-fedemb"]["outputDefinitions"]["artifacts"]
    outputs["diagnostics"] = copy.deepcopy(outputs["model"])


def _account_on_exit(documents):
    _task(documents, "account-privacy")["triggerPolicy"] = {
        "strategy": "ALL_UPSTREAM_TASKS_COMPLETED"
    }


def _unknown_field(documents):
    _task(documents, "gate-release")["retries"] = 3


PLANTED = {
    "no_cache": [_cache_training, _cache_gate, _cache_reserve],
    "no_cache_key": [_cache_key],
    "no_retry": [_retry_training, _retry_around_training],
    "no_stale_import": [_stale_import],
    "images_by_digest": [_mutable_tag],
    "no_secret_parameters": [_secret_parameter],
    "release_behind_gate": [_release_without_gate, _release_despite_gate],
    "no_raw_outputs": [_raw_output],
    "harmless_exit_handlers": [_account_on_exit],
    "strict_protos": [_unknown_field],
}


def test_our_pipeline_breaks_no_rule(compiled):
    assert violations(compiled) == []


def test_every_rule_has_a_planted_change():
    assert set(PLANTED) == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("rule", "plant"),
    [(rule, plant) for rule, plants in PLANTED.items() for plant in plants],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_rule_notices_its_planted_change(compiled, rule, plant):
    changed = copy.deepcopy(compiled)
    plant(changed)
    named = {item.__name__: item for item in RULES}[rule]
    assert list(named(*changed))


def test_only_public_steps_may_be_cached(compiled):
    tasks = compiled[0]["root"]["dag"]["tasks"]
    cached = {name for name, task in tasks.items() if task["cachingOptions"].get("enableCache")}
    assert cached == {name.replace("_", "-") for name in PUBLIC_STEPS}


def test_index_draws_the_arrows_of_the_pipeline(compiled):
    tasks = compiled[0]["root"]["dag"]["tasks"]
    assert set(tasks) == {name.replace("_", "-") for name in STEPS}
    direct = {name: set(task.get("dependentTasks", [])) for name, task in tasks.items()}

    def above(name):
        return direct[name] | {far for near in direct[name] for far in above(near)}

    for name, before in AFTER.items():
        drawn = {step.replace("_", "-") for step in before}
        reachable = drawn | {far for step in drawn for far in above(step)}
        assert drawn <= direct[name.replace("_", "-")]
        assert reachable == above(name.replace("_", "-"))


@pytest.mark.parametrize("reference", ["registry.example/fedemb:latest", "fedemb", "x@sha256:12"])
def test_image_without_digest_is_refused(reference):
    with pytest.raises(ConfigError, match="names no digest"):
        parse_images([reference])


def test_accelerators_follow_the_profile(compiled):
    containers = {
        name: executor["container"]
        for name, executor in compiled[0]["deploymentSpec"]["executors"].items()
    }
    accelerated = {
        name
        for name, container in containers.items()
        if "accelerator" in container.get("resources", {})
    }
    assert not accelerated & {"exec-gate-release", "exec-reserve-budget", "exec-partition-users"}


@pytest.mark.parametrize("profile", ["cpu", "gpu", "tpu"])
def test_compiled_pipeline_is_the_golden_one(profile, tmp_path, request):
    path = tmp_path / "pipeline.yaml"
    compile_pipeline(path, profile=profile, images=parse_images([IMAGE]))
    text = "".join(
        line for line in path.read_text().splitlines(True) if not line.startswith("sdkVersion")
    )
    golden = GOLDEN / f"pipeline_{profile}.yaml"
    if request.config.getoption("--force-regen"):
        golden.write_text(text)
    assert text == golden.read_text(), "the compiled pipeline changed; review with `make golden`"
