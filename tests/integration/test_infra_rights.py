"""The real steps behind the rights of infra/rights.yaml: none lacks one, and none has one too many.

`rights_fence` replaces the cloud. A simulation of each task goes from the reservation to the
audit, with every feature that reads something on; a release from the reservation to the bundle, on
the small honest run. Each is interrupted and resumed where a resumed run asks for other things.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedemb.config import RunConfig
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import StorageError
from fedemb.keys import open_key_store, secret_manager
from fedemb.ledger import begin_policy, ensure_trust, open_ledger, series_of, terms_of
from fedemb.privacy.registry import plan_mechanism
from fedemb.runtime.step_context import StepContext
from fedemb.steps import evaluate_classifier, evaluate_embeddings
from fedemb.storage import buckets, open_store
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.partition_run import make_config, rows_of
from tests.kit.rights_fence import GROUPS, Fence, FencedBucket, FencedKeys
from tests.kit.sealed_bundle import seal

pytestmark = pytest.mark.long

LEDGER, PRIVATE_ROOT, KEYS = "gs://ledger", "gs://private", "gsm://keys/fedemb"
RELEASES = "gs://releases"
ROLLBACK_ANCHOR = "gs://rollback_anchor"
PREVIOUS = f"{RELEASES}/embedding/before"


@pytest.fixture(scope="module")
def fence(tmp_path_factory):
    """The cloud, empty."""
    made = Fence(tmp_path_factory.mktemp("cloud"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FencedBucket, "fence", made, raising=False)
        patched.setattr(buckets, "GcsStore", FencedBucket)
        keys = FencedKeys(made)
        patched.setattr(secret_manager, "_secret_manager_client", lambda: keys)
        yield made


def _owner_begins(config: RunConfig) -> None:
    """As `fedemb ledger init`."""
    keys = open_key_store(KEYS)
    trust = ensure_trust(open_store(LEDGER), keys)
    ledger = open_ledger(LEDGER, config.policy.policy_id, trust=trust)
    terms = terms_of(config, series_of(config, plan_mechanism(config)))
    begin_policy(ledger, terms, keys, config.storage.rollback_anchor)


def _put_images(address: str, users: int, images: int, tmp_path: Path, classes: int = 0) -> None:
    rows = rows_of(users, images)
    if classes:
        rows = [{**row, "label": str(number % classes)} for number, row in enumerate(rows)]
    path = tmp_path / "images.parquet"
    pq.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), path)
    store, _, name = address.rpartition("/")
    open_store(store).upload(path, name)


SIMULATION = {
    "partition__virtual_clients": 4,
    "partition__groupings": 1,
    "partition__evaluation": {"by": "hash", "fraction": 0.5},
    "pretraining__kind": "supervised",
    "pretraining__source": {"uri": "gs://public-input/images.parquet"},
    "pretraining__epochs": 1,
    "model__backbone": "tiny",
    "model__embedding_dim": 8,
    "mechanism__rounds": 1,
    "training__parallel_clients": 1,
    "policy__policy_id": "trial",
    "policy__epsilon_cap": 1000.0,
    "evaluation__bootstrap_samples": 20,
    "evaluation__centralized_baseline": True,
    "evaluation__centralized_epochs": 1,
    "evaluation__previous_release": PREVIOUS,
    "audit__bootstrap_samples": 20,
    "storage__rollback_anchor": ROLLBACK_ANCHOR,
}


CLASSIFICATION = {
    **{name: value for name, value in SIMULATION.items() if not name.startswith("pretraining")},
    "task": "classification",
    "data__source__label_scope": "global",
    "model__classes": ["0", "1", "2"],
    "model__backbone": "tanh_cnn",
    "mechanism": {
        "kind": "poisson_gaussian",
        "rounds": 1,
        "sampling_probability": 0.5,
        "units_per_round": 5,
        "noise_multiplier": 1.0,
    },
    "training__algorithm": "dp_sgd",
    "training__unit_gradient__microbatch": 8,
    "policy__policy_id": "classes",
    "evaluation__previous_release": None,
}


@pytest.fixture(scope="module")
def simulated(fence, tmp_path_factory):
    """From the reservation to the audit, each step in the name of its group."""
    from fedemb.steps import train_dp_fedemb

    here = tmp_path_factory.mktemp("simulation")
    config = make_config("gs://private-input/images.parquet", **SIMULATION)
    _put_images("gs://private-input/images.parquet", 60, 3, here)
    _put_images("gs://public-input/images.parquet", 4, 3, here)
    report = _simulate(fence, config, here, train_dp_fedemb, evaluate_embeddings)
    assert report["previous_release"]["old"]
    return fence


@pytest.fixture(scope="module")
def classified(fence, tmp_path_factory):
    """The same of a classifier, trained by DP-SGD."""
    from fedemb.steps import train_dp_sgd

    here = tmp_path_factory.mktemp("classifier")
    config = make_config("gs://private-input/classes.parquet", **CLASSIFICATION)
    _put_images("gs://private-input/classes.parquet", 60, 3, here, classes=3)
    report = _simulate(fence, config, here, train_dp_sgd, evaluate_classifier)
    assert report["classes"] == 3
    return fence


def _simulate(fence: Fence, config: RunConfig, here: Path, train: Any, evaluate: Any) -> Any:
    """Plan to audit of one run; returns the utility report."""
    from fedemb.steps import (
        audit_privacy,
        partition_users,
        plan_privacy,
        pretrain_public,
        reserve_budget,
    )

    _owner_begins(config)

    names = ("privacy_plan", "reservation", "users", "pretrained", "model")
    reports = ("utility_report", "utility_page", "audit_report", "audit_page")
    artifacts = RunArtifacts(**{name: here / name for name in (*names, *reports)})
    stores = {"private_root": PRIVATE_ROOT, "ledger": LEDGER, "keys": KEYS}

    def context() -> StepContext:
        return StepContext(
            artifacts, config=config, run_id=f"monday-{config.policy.policy_id}", **stores
        )

    with fence.acting("plan_privacy"):
        plan_privacy.run(context())
    with fence.acting("pretrain_public"):
        pretrain_public.run(config.public_start(), here / "pretrained", open_key_store(KEYS))
    if config.evaluation.previous_release:
        seal(context(), here / "pretrained" / "backbone.keras", here / "before")
        place, _, name = PREVIOUS.rpartition("/")
        open_store(place).upload_tree(here / "before", name)
    for _ in range(2):  # a resumed run reserves and partitions again
        with fence.acting("reserve_budget"):
            reserve_budget.run(context())
        with fence.acting("partition_users"):
            partition_users.run(context())
    trainer, evaluator = (each.__name__.split(".")[-1] for each in (train, evaluate))
    for _ in range(2):  # so does the trainer, when it is killed after its last act
        with fence.acting(trainer):
            train.run(context())
    with fence.acting(evaluator):
        report = evaluate.run(context()).json
    with fence.acting("audit_privacy"):
        assert audit_privacy.run(context())["measured"]
    return report


class _Remote(honest_run.HonestRun):
    ledger_uri = LEDGER
    keys_uri = KEYS
    releases_uri = RELEASES


@pytest.fixture(scope="module")
def released(fence, tmp_path_factory):
    """From the reservation to the bundle, on evidence without images."""
    root = tmp_path_factory.mktemp("release")
    from fedemb.steps import show_outcome
    from fedemb.steps.show_outcome import Started

    honest_run.start(root)  # the public backbone
    run = _Remote(root, "tuesday", honest_run.config(), root)
    _owner_begins(run.config)
    acts = {
        "plan": "plan_privacy",
        "pretrain": "pretrain_public",
        "reserve": "reserve_budget",
        "partition": "partition_users",
        "train": "train_dp_fedemb",
        "evaluate": "evaluate_embeddings",
        "audit": "audit_privacy",
        "account": "account_privacy",
        "gate": "gate_release",
        "release": "release_model",
    }
    for act, step in acts.items():
        for _ in range(1 if act == "train" else 2):
            with fence.acting(step):
                getattr(run, f"do_{act}")()
    assert run.ledger().state.attempts["tuesday", 1].status == "released"
    task = root / "public" / "show-outcome" / "0ae1"
    task.mkdir(parents=True)
    names = ("outcome", "summary", "verdict")
    shown = RunArtifacts(**{name: task / name for name in names})
    with fence.acting("show_outcome"):
        show_outcome.run(StepContext(shown), Started(), uri=str(shown.outcome), state="SUCCEEDED")
    assert shown.outcome.read_text()
    return fence


def test_no_step_asks_for_more_than_its_group_has(simulated, classified, released):
    assert not simulated.refused
    granted = {
        group
        for group, rights in GROUPS.items()
        if any(right not in ("none", {}, []) for name, right in rights.items() if name != "steps")
    }
    assert set(GROUPS) - granted == {"show"}, "it reads the public root alone"
    assert {group for group in GROUPS if simulated.used[group]} == granted


@pytest.mark.parametrize("group", GROUPS)
def test_no_group_has_more_than_its_steps_ask_for(group, simulated, classified, released):
    used = simulated.used[group]
    verbs: dict[tuple[str, str], set[str]] = {}
    for kind, thing, verb in used:
        verbs.setdefault((kind, thing), set()).add(verb)
    found: dict[str, Any] = {"steps": GROUPS[group]["steps"]}
    found["private"] = {
        folder: "write" if "create" in asked else "delete" if asked == {"delete"} else "read"
        for (kind, folder), asked in verbs.items()
        if kind == "private" and folder
    }
    found["input"] = sorted(
        kind.removesuffix("-input") if "get" in asked else "names"
        for (kind, _), asked in verbs.items()
        if kind.endswith("-input")
    )
    for bucket, most in (
        ("ledger", "append"),
        ("releases", "create"),
        ("rollback_anchor", "append"),
    ):
        asked = verbs.get((bucket, ""), set())
        found[bucket] = most if "create" in asked else "read" if asked else "none"
    found["signing"] = sorted(role for kind, role in verbs if kind == "signing")
    found["keys"] = {
        of: next((right for right in ("destroy", "create") if right in asked), "read")
        for (kind, of), asked in verbs.items()
        if kind == "keys"
    }
    table = GROUPS[group]
    ordered = {name: sorted(table[name]) for name in ("input", "signing")}
    assert found == {**table, **ordered}


def test_planted_table_without_a_right_stops_the_step(fence, monkeypatch):
    """Control for the tests above: the fence refuses what the table does not grant."""
    monkeypatch.setattr(fence, "refused", [])
    monkeypatch.setitem(GROUPS["partition"], "private", {})
    with fence.acting("partition_users"), pytest.raises(StorageError, match="may not list"):
        open_store("gs://private/first/users").list()
    with fence.acting("partition_users"), pytest.raises(StorageError, match="cannot be reached"):
        open_key_store(KEYS).fetch("signing/policy")
    assert len(fence.refused) == 2
