"""Receivers of alerts and MLflow on a cluster: secrets and a way out for reporting steps only."""

from pathlib import Path

import pytest
import yaml

from fedemb.pipelines.compile.cluster import compile_pipeline, parse_images
from fedemb.pipelines.compile.rules import read_compiled
from fedemb.pipelines.steps import MAINTENANCE, PIPELINES
from fedemb.reports.alerts.send import EMAIL, SLACK, WEBHOOK
from fedemb.runtime.step import declared
from tests.kit.schedule_kit import IMAGE

INFRA = Path(__file__).parents[2] / "infra"
REPORTING = {"show-outcome", "watch-budget"}


def executors(pipeline, folder):
    path = folder / f"{pipeline.name}.yaml"
    profiles = ["cpu", INFRA / "profiles" / "receivers.yaml"]
    compile_pipeline(path, profile=profiles, images=parse_images([IMAGE]), pipeline=pipeline)
    platform = read_compiled(path)[1]["platforms"]["kubernetes"]
    return {
        held["podMetadata"]["labels"]["fedemb.dev/step"]: held
        for held in platform["deploymentSpec"]["executors"].values()
    }


@pytest.mark.parametrize("pipeline", [*PIPELINES, *MAINTENANCE], ids=lambda item: item.name)
def test_only_reporting_steps_get_the_secret_and_start_without_its_keys(pipeline, tmp_path):
    found = executors(pipeline, tmp_path)
    holders = {step for step, held in found.items() if "secretAsEnv" in held}
    assert holders == REPORTING & set(found)
    for step in holders:
        (secret,) = found[step]["secretAsEnv"]
        assert secret["optional"] is True
        variables = {item["envVar"] for item in secret["keyToEnv"]}
        assert variables >= {WEBHOOK, SLACK, EMAIL}


def test_policy_opens_a_way_for_reporting_steps_only():
    policy = yaml.safe_load((INFRA / "kustomize" / "receivers.yaml").read_text())["spec"]
    (selected,) = policy["podSelector"]["matchExpressions"]
    assert set(selected["values"]) == REPORTING
    assert policy["policyTypes"] == ["Egress"]
    for step in REPORTING:
        found = declared(step.replace("-", "_"))
        assert not found.private
        assert not found.rights.signing
        assert not found.rights.keys
        assert found.rights.private == {}
