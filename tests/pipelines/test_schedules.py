"""Schedules as data: checked, priced, reconciled through the real kfp client."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from fedemb.errors import BudgetExceeded, ConfigError, StorageError
from fedemb.foundation.canonical_json import file_digest
from fedemb.pipelines.cli.cluster import objects
from fedemb.pipelines.cluster import kubeflow as recurring
from fedemb.pipelines.cluster.kubeflow import Kubeflow
from fedemb.pipelines.cluster.package import checked_digest
from fedemb.pipelines.cluster.schedule import load_schedule, load_schedules
from fedemb.pipelines.run.load_config import load_config
from tests.kit.schedule_kit import IMAGE, change_schedule
from tests.kit.servers.kfp_stand_in import Fault, schedule_of

NOW = datetime(2026, 12, 1, 12, tzinfo=UTC)
RUNNING = datetime(2027, 1, 13, 12, tzinfo=UTC)
"""A Wednesday: the schedule of the example has run twice and is next due on Monday the 18th."""


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(recurring, "WAITS", (0.0, 0.0))


def _kubeflow(kfp, namespace="team-a"):
    return Kubeflow(kfp.url, namespace)


def _objects(namespace="team-a"):
    """The Kubernetes objects of a namespace; none can be read unless `cluster` is used."""
    return objects(namespace)


def _plan(kfp, folder, now=NOW, namespace="team-a"):
    """Of a folder, or of schedules that were loaded before."""
    loaded = load_schedules(folder) if isinstance(folder, Path) else folder
    return recurring.plan(_kubeflow(kfp, namespace), loaded, now, _objects(namespace))


def _apply(kfp, folder, now=NOW, namespace="team-a"):
    changes = _plan(kfp, folder, now, namespace)
    recurring.apply(_kubeflow(kfp, namespace), changes, now, _objects(namespace))
    return changes


def _actions(changes):
    return [(change.action, change.name) for change in changes]


def test_schedule_price_equals_the_ledger_price(folder):
    from fedemb.privacy.accounting import price
    from fedemb.privacy.guarantee import repeated
    from fedemb.privacy.registry import plan_mechanism

    loaded = load_schedule(folder / "weekly.yaml")
    plan = plan_mechanism(loaded.config)
    series = price(repeated(plan.event(), 13), plan.relation, loaded.config.policy.delta, runs=13)
    whole, one = _epsilons(loaded)
    assert whole == pytest.approx(series.epsilon, abs=1e-3)
    assert one < whole < 13 * one
    assert loaded.cost.startswith("13 runs, at most epsilon=")
    assert "planned_series" in loaded.cost


def _epsilons(loaded):
    """Epsilon of all runs and of one, as the price says."""
    found = re.search(r"epsilon=([\d.]+) .*one run: ([\d.]+)\)", loaded.cost)
    return float(found[1]), float(found[2])


def test_schedule_above_its_budget_is_refused(folder):
    with pytest.raises(BudgetExceeded, match=r"its budget allows 0\.100"):
        load_schedule(change_schedule(folder, "dear", budget={"epsilon": 0.1}))
    with pytest.raises(BudgetExceeded, match="the policy allows"):
        load_schedule(change_schedule(folder, "dear", overrides={"policy.epsilon_cap": 0.2}))
    with pytest.raises(BudgetExceeded, match="more than the policy holds"):
        load_schedule(change_schedule(folder, "dear", end=datetime(2027, 6, 1, tzinfo=UTC)))


def test_schedule_that_never_fires_is_refused(folder):
    with pytest.raises(ConfigError, match="never fires from 2027-01-01 to 2027-04-01"):
        load_schedule(change_schedule(folder, "weekly", cron="0 0 3 30 2 *"))


def test_schedules_of_two_policies_have_separate_budgets(folder):
    change_schedule(
        folder, "monthly", cron="0 0 5 1 * *", overrides={"policy.policy_id": "another"}
    )
    assert [item.schedule.name for item in load_schedules(folder)] == ["monthly", "weekly"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cron": "0 3 * * 1"}, "six"),
        ({"end": datetime(2020, 1, 1, tzinfo=UTC)}, "after start"),
        ({"end": datetime(2027, 2, 1)}, "timezone"),
        ({"surprise": 1}, "surprise"),
        ({"package": {"sha256": "0" * 64}}, "pins"),
        ({"package": {"path": "absent.yaml"}}, "missing"),
        ({"overrides": {"storage.ledger": None}}, "storage.ledger"),
        ({"overrides": {"data.source.uri": "builtin"}}, "on this machine"),
        ({"overrides": {"data.source.uri": "images/*.parquet"}}, "on this machine"),
        (
            {"overrides": {"storage.ledger": "s3://me:key@host/ledger"}},
            "contains a user, a password",
        ),
        ({"beam_options": ["--s3_secret_access_key=abc"]}, "a key or a password"),
    ],
)
def test_invalid_schedules_are_refused(folder, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_schedule(change_schedule(folder, "wrong", **changes))


@pytest.mark.parametrize(
    ("profile", "backends"), [("cpu", ["tensorflow", "jax"]), ("gpu", ["jax"]), ("tpu", ["jax"])]
)
def test_a_backend_that_the_trainers_images_do_not_have_is_refused(tmp_path, profile, backends):
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images
    from fedemb.pipelines.cluster.package import check_package

    for preset in ("quickstart", "dp_sgd_quickstart"):
        config, path = load_config(preset, []), tmp_path / f"{preset}.yaml"
        images = parse_images([IMAGE])
        compile_pipeline(path, profile=profile, images=images)
        for backend in ("tensorflow", "jax"):
            chosen = config.updated({"training.backend": backend})
            if backend in backends:
                check_package(path, config=chosen)
                continue
            with pytest.raises(
                ConfigError, match=r"train on jax.* is tensorflow; set training\.backend: jax"
            ):
                check_package(path, config=chosen)


def test_planning_and_reapplying_an_unchanged_folder_change_nothing(folder, kfp):
    changes = _plan(kfp, folder)
    assert _actions(changes) == [("create", "weekly")]
    assert "epsilon=" in str(changes[0])
    assert kfp.calls == []
    _apply(kfp, folder)
    (schedule,) = load_schedules(folder)
    (run,) = kfp.recurring.values()
    assert run["no_catchup"] is True
    assert run["max_concurrency"] == "1"
    assert run["mode"] == "ENABLE"
    assert run["namespace"] == "team-a"
    assert run["service_account"] == "fedemb-run"
    assert run["trigger"]["cron_schedule"]["cron"] == "0 0 3 * * 1"
    assert run["trigger"]["cron_schedule"]["end_time"].startswith("2027-04-01T00:00:00")
    assert run["runtime_config"]["parameters"] == schedule.arguments
    version = kfp.versions[run["pipeline_version_reference"]["pipeline_version_id"]]
    assert version["_content"] == schedule.package.read_bytes()
    before = list(kfp.calls)
    for now in (NOW, RUNNING):
        assert _actions(_apply(kfp, folder, now)) == [("keep", "weekly")]
    assert kfp.calls == before


def test_changed_schedule_disables_the_old_run_before_enabling_the_new(folder, kfp):
    _apply(kfp, folder)
    change_schedule(folder, "weekly", cron="0 0 4 * * 1", budget={"epsilon": 7.5})
    assert _actions(_plan(kfp, folder)) == [("replace", "weekly")]
    kfp.calls.clear()
    _apply(kfp, folder)
    assert kfp.calls == [
        "POST recurringruns",
        "POST recurringruns disable",
        "POST recurringruns enable",
        "DELETE recurringruns",
    ]
    assert _actions(_plan(kfp, folder)) == [("keep", "weekly")]


FAULTS = {
    "refused": {},
    "carried out and refused": {"carried_out": True},
    "answer lost": {"carried_out": True, "cut": True},
    "connection stays lost": {"cut": True, "lasts": True},
    "connection stays lost after a call was carried out": {
        "carried_out": True,
        "cut": True,
        "lasts": True,
    },
}


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("there", ["nothing", "another", "a disabled one"])
def test_failed_apply_enables_at_most_one_and_the_next_repairs_it(folder, cluster, there, fault):
    """While the connection holds, a schedule that was enabled before stays enabled."""
    change_schedule(folder, "weekly")
    older = load_schedules(folder)
    change_schedule(folder, "weekly", cron="0 0 4 * * 1", budget={"epsilon": 7.5})
    newer = load_schedules(folder)
    failed = 0
    for at in range(1, 40):
        for state in (cluster.recurring, cluster.scheduled_workflows, cluster.pipelines):
            state.clear()
        cluster.versions.clear()
        cluster.experiments.clear()
        before = 0
        if there != "nothing":
            _apply(cluster, older)
            before = 1
        if there == "a disabled one":
            next(iter(cluster.recurring.values()))["mode"] = "DISABLE"
            before = 0
        changes, kubeflow = _plan(cluster, newer, RUNNING), _kubeflow(cluster)
        cluster.fault = Fault(at, **FAULTS[fault])
        said = ""
        try:
            recurring.apply(kubeflow, changes, RUNNING, _objects())
        except StorageError as error:
            failed, said = failed + 1, str(error)
        enabled = len(cluster.enabled("team-a", "weekly"))
        assert (0 if cluster.fault.lasts else before) <= enabled <= 1, f"call {at}"
        if enabled < before:
            assert "is stopped, or its old version still fires" in said
            assert "`fedemb schedule` again" in said
        done = cluster.fault.at > 0
        cluster.fault = None
        for _ in range(2):
            _apply(cluster, newer, RUNNING)
        (run,) = cluster.recurring.values()
        assert run["mode"] == "ENABLE"
        assert run["trigger"]["cron_schedule"]["cron"] == "0 0 4 * * 1"
        assert len(cluster.scheduled_workflows) == 1, "a copy is left"
        assert len(cluster.versions) == len(cluster.pipelines) == 1
        assert _actions(_plan(cluster, newer, RUNNING)) == [("keep", "weekly")]
        assert cluster.tick(RUNNING) == []
        if done:
            break
    assert cluster.at_once == 1
    assert done
    assert failed >= 1


def test_a_recurring_run_that_kubeflow_could_not_list_is_removed(folder, cluster, monkeypatch):
    """Its row was refused; its object stays, disabled, and only Kubernetes shows it."""
    with monkeypatch.context() as patch:
        patch.setattr("tests.kit.servers.kfp_stand_in.LONGEST", 10)
        with pytest.raises(StorageError, match=r"answered 500.*is unchanged"):
            _apply(cluster, folder)
        assert _actions(_plan(cluster, folder))[0] == ("delete", "weekly")
        cluster.scheduled_workflows.clear()
        cluster.cluster_status = 403
        with pytest.raises(StorageError, match="kubectl -n team-a get scheduledworkflows"):
            _apply(cluster, folder)
        assert len(cluster.scheduled_workflows) == 1
    cluster.cluster_status = 200
    assert _actions(_apply(cluster, folder)) == [("delete", "weekly"), ("create", "weekly")]
    ((_, left),) = cluster.scheduled_workflows.items()
    assert left["metadata"]["uid"] in cluster.recurring


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [("metadata", "generateName", "another-name"), ("spec", "enabled", True)],
)
def test_foreign_scheduled_workflow_is_not_deleted(folder, cluster, part, field, value):
    _apply(cluster, folder)
    (ours,) = cluster.scheduled_workflows.values()
    other = json.loads(json.dumps(ours))
    other["metadata"] |= {"name": "other", "uid": "other"}
    other["spec"]["enabled"] = False
    cluster.scheduled_workflows["other"] = other
    assert _actions(_plan(cluster, folder)) == [("delete", "weekly"), ("keep", "weekly")]
    other[part][field] = value
    assert _actions(_plan(cluster, folder)) == [("keep", "weekly")]


def test_missed_schedule_slots_are_not_run(folder, kfp):
    """Without catch-up Kubeflow still starts the latest slot since the start; so start is now."""
    _apply(kfp, folder, RUNNING)
    assert kfp.tick(RUNNING) == []
    change_schedule(folder, "weekly", cron="0 0 4 * * 1", budget={"epsilon": 7.5})
    _apply(kfp, folder, RUNNING)
    assert kfp.tick(RUNNING) == []
    assert kfp.tick(RUNNING + timedelta(days=5)) == ["weekly 2027-01-18 04:00"]
    assert kfp.tick(RUNNING + timedelta(days=5)) == []


def _other_policy(folder, name, **changes):
    """A schedule beside `weekly` that draws from a budget of its own."""
    overrides = {"policy.policy_id": f"{name}-2027"}
    return change_schedule(folder, name, cron="0 0 5 1 * *", overrides=overrides, **changes)


def test_ui_copy_is_replaced_and_foreign_recurring_run_kept(folder, kfp):
    _apply(kfp, folder)
    (ours,) = kfp.recurring.values()
    cloned = {"recurring_run_id": "copy", "display_name": f"Clone of {ours['display_name']}"}
    kfp.recurring["copy"] = {**ours, **cloned}
    stranger = {**ours, "recurring_run_id": "stranger", "description": "by hand"}
    kfp.recurring["stranger"] = stranger
    assert _actions(_apply(kfp, folder)) == [("replace", "weekly")]
    assert kfp.recurring["stranger"] == stranger
    assert len(kfp.recurring) == 2
    assert _actions(_plan(kfp, folder)) == [("keep", "weekly")]


def test_removed_schedules_are_disabled_and_foreign_runs_kept(folder, kfp):
    for name in ("monthly", "nightly"):
        _other_policy(folder, name)
    _apply(kfp, folder)
    foreign = dict(next(iter(kfp.recurring.values())))
    foreign |= {"recurring_run_id": "theirs", "display_name": "theirs", "description": "by hand"}
    kfp.recurring["theirs"] = foreign
    (folder / "monthly.yaml").unlink()
    changes = _apply(kfp, folder)
    assert _actions(changes) == [("keep", "nightly"), ("keep", "weekly"), ("disable", "monthly")]
    modes = {schedule_of(run): run["mode"] for run in kfp.recurring.values()}
    assert modes == {
        "monthly": "DISABLE",
        "nightly": "ENABLE",
        "weekly": "ENABLE",
        "theirs": "ENABLE",
    }
    assert _actions(_plan(kfp, folder)) == [("keep", "nightly"), ("keep", "weekly")]


def test_last_schedule_is_disabled_by_its_file_and_not_by_an_empty_folder(folder, kfp):
    """An empty folder is more likely the wrong one than a wish to stop everything."""
    _apply(kfp, folder)
    stopped = change_schedule(folder, "weekly", enabled=False)
    assert _actions(_apply(kfp, folder)) == [("disable", "weekly"), ("keep", "weekly")]
    assert [run["mode"] for run in kfp.recurring.values()] == ["DISABLE"]
    assert _actions(_plan(kfp, folder)) == [("keep", "weekly")]
    stopped.unlink()
    with pytest.raises(ConfigError, match="enabled: false"):
        load_schedules(folder)


def test_a_new_package_is_a_new_version_and_an_old_one_is_not_uploaded_again(folder, kfp):
    _apply(kfp, folder)
    pinned = folder / "fedemb.yaml.package"
    pinned.write_text(pinned.read_text() + "\n")
    change_schedule(folder, "weekly")
    assert _actions(_apply(kfp, folder)) == [("replace", "weekly")]
    uploads = len(kfp.versions)
    change_schedule(folder, "weekly", cron="0 0 4 * * 1")
    _apply(kfp, folder)
    assert len(kfp.versions) == uploads
    _other_policy(folder, "second")
    _apply(kfp, folder)
    assert len(kfp.versions) == uploads + 1, "it would bear the name of the first policy"


def test_forbidden_kubeflow_api_call_is_a_storage_error(folder, kfp):
    kubeflow = _kubeflow(kfp)
    kfp.fail_with = 403
    with pytest.raises(StorageError, match=r"answered 403 \(forbidden.*for namespace team-a"):
        recurring.plan(kubeflow, load_schedules(folder), NOW, _objects())


def test_schedule_command_prints_cost_and_changes(folder, kfp):
    from fedemb.pipelines.cli.main import app

    run = CliRunner().invoke
    dry = run(app, ["schedule", str(folder), "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "13 runs, at most epsilon=" in dry.output
    change_schedule(
        folder, "weekly", start=datetime.now(UTC), end=datetime.now(UTC) + timedelta(days=80)
    )
    where = [str(folder), "--host", kfp.url]
    pins = folder.parent / "pins.yaml"
    pins.write_text(yaml.safe_dump({"packages": ["0" * 64]}))
    words = ["schedule", *where, "--yes", "--profile", "cpu", "--profile", str(pins)]
    assert "which the profile does not list" in str(run(app, words).exception)
    assert kfp.enabled("fedemb", "weekly") == []
    assert "create weekly" in run(app, ["schedule", *where, "--dry-run"]).output
    assert run(app, ["schedule", *where, "--check"]).exit_code == 1
    applied = run(app, ["schedule", *where, "--yes"])
    assert "1 change(s) carried out" in applied.output
    assert run(app, ["schedule", *where, "--check"]).exit_code == 0
    assert "nothing to do" in run(app, ["schedule", *where]).output
    assert len(kfp.enabled("fedemb", "weekly")) == 1


def test_package_that_the_profile_does_not_list_is_refused(folder, tmp_path):
    """The rules of compilation do not see whether the code of a step was changed."""
    loaded = load_schedule(folder / "weekly.yaml")
    digest = file_digest(loaded.package)
    assert checked_digest(loaded.package, ()) == digest
    pins = tmp_path / "pins.yaml"
    pins.write_text(yaml.safe_dump({"packages": ["0" * 64, digest]}))
    assert checked_digest(loaded.package, ("cpu", str(pins))) == digest
    changed = tmp_path / "changed.yaml"
    changed.write_text(loaded.package.read_text() + "# another step\n")
    assert checked_digest(changed, ("cpu",)) != digest
    with pytest.raises(ConfigError, match="which the profile does not list"):
        checked_digest(changed, ("cpu", str(pins)))


def test_scheduled_workflow_without_an_enabled_field_is_disabled(kfp, cluster, folder):
    _apply(kfp, folder)
    (made,) = kfp.scheduled_workflows.values()
    for enabled in (True, False):
        made["spec"]["enabled"] = enabled  # the stand-in omits false
        (found,) = _objects("team-a").scheduled_workflows()
        assert found.enabled is enabled
