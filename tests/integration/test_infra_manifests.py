"""What of infra/ can be checked without a cluster or a cloud.

One table of rights (infra/rights.yaml) stands behind everything, so everything is held against it.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import celpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from fedemb.config import RunConfig
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import StorageError
from fedemb.keys import open_key_store, secret_manager
from fedemb.ledger import ensure_trust, init_policy, open_ledger, series_of, terms_of
from fedemb.privacy.registry import plan_mechanism
from fedemb.runtime.step_context import StepContext
from fedemb.steps import evaluate_model
from fedemb.storage import buckets, open_store
from fedemb.training import host_messages as train_job
from tests.kit.pipeline_runs import honest_run
from tests.kit.pipeline_runs.partition_run import make_config, rows_of
from tests.kit.rights_fence import GROUPS as GROUPS_RIGHTS
from tests.kit.rights_fence import Fence, FencedBucket, FencedKeys
from tests.kit.sealed_bundle import seal

INFRA = Path(__file__).parents[2] / "infra"
OVERLAYS = ["gke", "s3", "laptop"]
GROUPS = yaml.safe_load((INFRA / "rights.yaml").read_text())["groups"]
KUBERNETES = "1.36"


def _render(overlay: str) -> list[dict]:
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        if shutil.which(command[0]):
            folder = INFRA / "kustomize" / "overlays" / overlay
            output = subprocess.run(
                [*command, str(folder)], capture_output=True, text=True, check=False
            )
            assert output.returncode == 0, output.stderr
            return list(yaml.safe_load_all(output.stdout))
    pytest.skip("neither kubectl nor kustomize is installed")
    return []


@pytest.fixture(params=OVERLAYS)
def manifests(request) -> list[dict]:
    """All objects of an overlay."""
    return _render(request.param)


def _of_kind(manifests: list[dict], kind: str) -> dict[str, dict]:
    return {item["metadata"]["name"]: item for item in manifests if item["kind"] == kind}


@pytest.mark.long
def test_manifests_are_valid_by_the_schemas_of_kubernetes(manifests):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="the package kubernetes-validate is not installed"
    )
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_step_is_in_exactly_one_group():
    from fedemb.pipelines.steps import all_steps

    found = [group["step"] for group in GROUPS.values()]
    assert sorted(found) == sorted(all_steps())


def test_each_group_has_its_account_and_the_admission_policies_are_bound(manifests):
    accounts = _of_kind(manifests, "ServiceAccount")
    assert set(accounts) - {"fedemb-owner"} == {f"fedemb-{group}" for group in [*GROUPS, "run"]}
    for kind in ("MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"):
        assert f"{kind}Binding" in {item["kind"] for item in manifests}


def _compiled(output: Path, profile: Any) -> dict[str, dict[str, Any]]:
    """Executor -> what its pod is given on the cluster."""
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images

    images = parse_images(["registry.example/fedemb@sha256:" + "a" * 64])
    compile_pipeline(output, profile=profile, images=images)
    _, platform = yaml.safe_load_all(output.read_text())
    return platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def test_network_policies_allow_only_hosts_and_stores(manifests):
    policies = _of_kind(manifests, "NetworkPolicy")
    closed = policies["fedemb-nothing-else"]["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = {name for name, policy in policies.items() if "ingress" in policy["spec"]}
    assert opened == {"fedemb-ui-artifact", "fedemb-chief", "fedemb-hosts"}
    hosts = {"matchLabels": {train_job.HOST_LABEL: "train"}}
    chief = {"matchLabels": {"fedemb.dev/step": "train-model"}}
    for name, own, peers in (
        ("fedemb-chief", chief, [hosts]),
        ("fedemb-hosts", hosts, [chief, hosts]),
    ):
        spec = policies[name]["spec"]
        assert spec["podSelector"] == own
        (inward,), (outward,) = spec["ingress"], spec["egress"]
        wanted = [{"podSelector": peer} for peer in peers]
        assert (inward["from"], outward["to"]) == (wanted, wanted), "only each other"
    for name in ("fedemb-kubeflow", "fedemb-stores", "fedemb-api-server"):
        (excluded,) = policies[name]["spec"]["podSelector"]["matchExpressions"]
        assert excluded == {"key": train_job.HOST_LABEL, "operator": "DoesNotExist"}
    assert policies["fedemb-ui-artifact"]["spec"]["podSelector"]["matchLabels"]
    assert all("to" in rule for rule in policies["fedemb-api-server"]["spec"]["egress"])
    assert all("to" in rule for rule in policies["fedemb-stores"]["spec"]["egress"])


def test_profile_for_s3_hands_each_step_the_keys_of_its_group_and_no_others(tmp_path):
    from fedemb.pipelines.cluster.compile import load_profile
    from fedemb.pipelines.steps import all_steps, key_claims

    profiles = ["gpu", INFRA / "profiles" / "s3.yaml"]
    executors = _compiled(tmp_path / "p.yaml", profiles)
    manifests = _render("s3")
    policy = _of_kind(manifests, "ValidatingAdmissionPolicy")["fedemb-pods"]["spec"]
    (named,) = [item for item in policy["variables"] if item["name"] == "claims"]
    admitted = yaml.safe_load(named["expression"])
    for step in all_steps().values():
        options = executors[f"exec-{step.slug}"]
        assert [item["secretName"] for item in options["secretAsEnv"]] == [
            f"fedemb-s3-{step.group}"
        ]
        mounts = {item["constant"]: item["mountPath"] for item in options.get("pvcMount", [])}
        assert set(mounts) == set(admitted.get(f"fedemb-{step.group}", []))
        assert mounts == {
            claim: f"/keys/{folder}" for claim, folder in key_claims(step.rights).items()
        }
        kinds = {mount.removeprefix("/keys/") for mount in mounts.values()}
        assert {kind for kind in kinds if not kind.startswith("signing/")} == set(step.rights.keys)
    reading = [
        group for group, held in admitted.items() if "fedemb-reservation-keys" in held
    ]  # evaluation and audit check users with the key of the policy
    assert sorted(reading) == ["fedemb-reserve", "fedemb-train"]
    claims = _of_kind(manifests, "PersistentVolumeClaim")
    assert set(claims) == {
        "fedemb-keys-policy",
        *(name for held in admitted.values() for name in held),
    }
    owner = yaml.safe_load((INFRA / "kustomize/overlays/s3/owner.yaml").read_text())["spec"]
    assert set(claims) == {
        volume["persistentVolumeClaim"]["claimName"]
        for volume in owner["volumes"]
        if "persistentVolumeClaim" in volume
    }
    hard = _of_kind(manifests, "ResourceQuota")["fedemb"]["spec"]["hard"]
    assert int(hard["persistentvolumeclaims"]) > len(claims)
    profile = load_profile(*profiles)
    assert profile.steps["train_model"].accelerator is not None, "laid over, not in place of"


# ---- the table of rights itself --------------------------------------------------------------


def test_policy_id_cannot_equal_a_reserved_folder():
    """`<policy>/train/...` would be the trainer's to write."""
    from fedemb.config.policy import PRIVATE_FOLDERS, PolicyConfig

    folders = {folder for rights in GROUPS.values() for folder in rights["private"]}
    assert folders == PRIVATE_FOLDERS
    fields = {"users_lower_bound": 100, "delta": 1e-3, "epsilon_cap": 1.0}
    assert PolicyConfig(policy_id="trains", **fields)
    with pytest.raises(ValueError, match=r"policy_id .train. is reserved"):
        PolicyConfig(policy_id="train", **fields)


@pytest.mark.parametrize("group", [*GROUPS, "run"])
def test_s3_policies_grant_what_the_table_says_and_no_more(group):
    policy = json.loads((INFRA / "s3" / f"{group}.json").read_text())
    granted: dict[str, set[str]] = {}
    for statement in policy["Statement"]:
        if statement["Effect"] == "Allow":
            for resource in statement["Resource"]:
                granted.setdefault(resource.removeprefix("arn:aws:s3:::"), set()).update(
                    action.removeprefix("s3:") for action in statement["Action"]
                )
    read, append = {"GetObject"}, {"GetObject", "PutObject"}
    write = append | {"DeleteObject", "AbortMultipartUpload"}
    none = dict.fromkeys(("ledger", "releases", "rollback_anchor"), "none")
    rights = GROUPS.get(group, {"private": {}, "input": [], **none})
    expected = {"fedemb-public/*": write}
    for folder, right in rights["private"].items():
        for name in (f"{folder}/*", f"{folder}.tree"):
            granted_here = {"read": read, "write": write, "delete": {"DeleteObject"}}[right]
            expected[f"fedemb-private/*/{name}"] = granted_here
    if rights["ledger"] != "none":
        expected["fedemb-ledger/*"] = append if rights["ledger"] == "append" else read
    if rights["releases"] != "none":
        expected["fedemb-releases/*"] = append if rights["releases"] == "create" else read
    if rights["rollback_anchor"] != "none":
        expected["fedemb-rollback-anchor/*"] = append
    for kind in rights["input"]:
        names_only = kind == "names"  # ListBucket, added below
        expected["fedemb-private-input" if names_only else f"fedemb-{kind}-input/*"] = (
            set() if names_only else read
        )
    for name in list(expected):
        expected.setdefault(name.partition("/")[0], set()).add("ListBucket")
    assert granted == expected
    if rights["ledger"] == "append":
        denied = [item for item in policy["Statement"] if item["Effect"] == "Deny"]
        assert "s3:DeleteObject" in denied[0]["Action"]
        never = {resource for item in denied for resource in item["Resource"]}
        assert ("arn:aws:s3:::fedemb-rollback-anchor/*" in never) == (
            rights["rollback_anchor"] != "none"
        )


def test_s3_bucket_policies_forbid_replacing_records():
    """Every write that makes an object must create it; the parts of a large one come before."""
    for name in ("ledger", "rollback-anchor"):
        (statement,) = json.loads((INFRA / "s3" / "buckets" / f"{name}.json").read_text())[
            "Statement"
        ]
        assert (statement["Effect"], statement["Principal"]) == ("Deny", "*")
        assert statement["Action"] == ["s3:PutObject"]
        assert statement["Resource"] == [f"arn:aws:s3:::fedemb-{name}/*"]
        assert statement["Condition"] == {
            "Null": {"s3:if-none-match": "true"},
            "Bool": {"s3:ObjectCreationOperation": "true"},
        }


# ---- Terraform -------------------------------------------------------------------------------


@pytest.mark.long
def test_ledger_is_locked_and_keys_are_in_no_bucket():
    hcl2 = pytest.importorskip("hcl2", reason="the package python-hcl2 is not installed")
    folder = INFRA / "terraform" / "gcs"
    resources: dict[str, dict] = {}
    for file in folder.glob("*.tf"):
        for block in hcl2.loads(file.read_text()).get("resource", []):
            for kind, named in block.items():
                for name, body in named.items():
                    resources[f"{kind}.{name}".replace('"', "")] = body
    buckets = {
        name: body for name, body in resources.items() if name.startswith("google_storage_bucket.")
    }
    assert set(buckets) == {
        f"google_storage_bucket.{name}"
        for name in ("public", "private", "ledger", "releases", "rollback_anchor")
    }
    locked = {name for name, body in buckets.items() if "retention_policy" in body}
    assert locked == {"google_storage_bucket.ledger", "google_storage_bucket.rollback_anchor"}
    rollback_anchor = buckets["google_storage_bucket.rollback_anchor"]
    assert "var.rollback_anchor_project" in str(rollback_anchor["project"]), "not the ledger's"
    (closed,) = [
        body for name, body in resources.items() if name.endswith("iam_binding.given_by_google")
    ]
    assert "projectOwner" in str(closed["members"])
    text = (folder / "stores.tf").read_text()
    assert all(f'"{name}"' in text for name in ("private", "ledger", "releases", "rollback_anchor"))
    for body in buckets.values():
        assert str(body["public_access_prevention"]).strip('"') == "enforced"


KEPT = ("ledger/photos/0.json", "trust.json", "keys/signing/gate")


@pytest.mark.long
def test_lifecycle_rules_expire_private_data_of_runs_and_nothing_that_must_stay():
    """Records, keys, anchors and releases are in other buckets, which have no rule."""
    hcl2 = pytest.importorskip("hcl2", reason="the package python-hcl2 is not installed")
    text = (INFRA / "terraform" / "gcs" / "stores.tf").read_text()
    found: dict[str, list[str]] = {}
    for block in hcl2.loads(text)["resource"]:
        for name, body in block.get('"google_storage_bucket"', {}).items():
            for rule in body.get("lifecycle_rule", []):
                (condition,) = rule["condition"]
                found[name.strip('"')] = [item.strip('"') for item in condition["matches_prefix"]]
    assert found == {"private": ["runs/"]}
    rules = {
        path.stem: json.loads(path.read_text())["Rules"]
        for path in (INFRA / "s3" / "buckets").glob("*-lifecycle.json")
    }
    assert list(rules) == ["private-lifecycle"]
    prefixes = [rule["Filter"]["Prefix"] for rule in rules["private-lifecycle"]]
    assert prefixes == found["private"]
    assert all(rule["Expiration"]["Days"] >= 30 for rule in rules["private-lifecycle"])
    assert not [name for name in KEPT for prefix in prefixes if name.startswith(prefix)]
    outputs = (INFRA / "terraform" / "gcs" / "outputs.tf").read_text()
    (private_root,) = re.findall(
        r'private_root\s+= "gs://\$\{google_storage_bucket.private.name\}/(.*)"', outputs
    )
    assert f"{private_root}/" in prefixes


def test_names_of_signing_secrets_are_those_of_the_key_store():
    import hashlib

    from fedemb.keys.secret_manager import SecretManagerKeyStore
    from fedemb.keys.trust import ROLES

    store = SecretManagerKeyStore("project", client=object())
    digest = hashlib.sha256(b"signing/report").hexdigest()
    assert store._secret_id("signing/report") == f"fedemb-signing-{digest}"
    text = (INFRA / "terraform" / "gcs" / "rights.tf").read_text()
    assert '"${var.key_prefix}-${split("/", name)[0]}-${sha256(name)}"' in text
    roles = re.search(r"signing_roles = toset\(\[(.*?)\]\)", text, re.S)
    assert sorted(re.findall(r'"(\w+)"', roles.group(1))) == sorted(ROLES)


# ---- The admission policies ----


ACCOUNTS = {rights["step"].replace("_", "-"): f"fedemb-{group}" for group, rights in GROUPS.items()}
CONTROLLER = "system:serviceaccount:kubeflow:argo"
POLICIES = list(yaml.safe_load_all((INFRA / "kustomize/base/step_accounts.yaml").read_text()))
MUTATING, _, VALIDATING, _ = (policy["spec"] for policy in POLICIES)


def _evaluate(expression: str, **names):
    environment = celpy.Environment()
    program = environment.program(environment.compile(expression))
    return program.evaluate({name: celpy.json_to_cel(value) for name, value in names.items()})


def _pod(step: str | None, account: str) -> dict:
    labels = {"labels": {"fedemb.dev/step": step}} if step else {}
    return {"metadata": {"name": "pod", **labels}, "spec": {"serviceAccountName": account}}


def _admitted(pod: dict, user: str, validations=VALIDATING["validations"]) -> bool:
    """As the API server: an expression that cannot be evaluated refuses (failurePolicy: Fail)."""
    names = {
        "object": pod,
        "request": {"userInfo": {"username": user}},
        "variables": {"accounts": ACCOUNTS},
    }
    try:
        return all(bool(_evaluate(rule["expression"], **names)) for rule in validations)
    except celpy.CELEvalError:
        return False


def test_both_policies_hold_the_same_map_of_steps_to_accounts():
    for policy in (MUTATING, VALIDATING):
        (variable,) = policy["variables"]
        assert dict(_evaluate(variable["expression"])) == ACCOUNTS
        assert policy["failurePolicy"] == "Fail"


@pytest.mark.parametrize("step", ACCOUNTS)
def test_a_step_gets_the_account_of_its_group_and_is_then_admitted(step):
    pod = _pod(step, "fedemb-run")
    assert _evaluate(MUTATING["matchConditions"][0]["expression"], object=pod)
    assert not _admitted(pod, CONTROLLER), "without the first policy nothing runs"
    patch = MUTATING["mutations"][0]["jsonPatch"]["expression"]
    value = re.search(r"value:\s*(.*)\}\]", patch, re.DOTALL).group(1)
    account = _evaluate(value, object=pod, variables={"accounts": ACCOUNTS})
    assert account == ACCOUNTS[step]
    assert _admitted(_pod(step, account), CONTROLLER)


REFUSED = {
    "a step on another group's account": (_pod("evaluate-model", "fedemb-train"), CONTROLLER),
    "an unknown step": (_pod("look-at-users", "fedemb-train"), CONTROLLER),
    "a pod without label on a group's account": (_pod(None, "fedemb-train"), CONTROLLER),
    "a step made by hand": (_pod("train-model", "fedemb-train"), "alice@example.org"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_admission_refuses_pods_that_are_not_steps(case):
    assert not _admitted(*REFUSED[case])


def test_each_admission_rule_is_needed():
    rules = VALIDATING["validations"]
    for rule in rules:
        others = [other for other in rules if other is not rule]
        assert any(_admitted(pod, user, others) for pod, user in REFUSED.values()), rule["message"]


def test_admission_ignores_drivers_and_other_pods():
    assert _admitted(_pod(None, "fedemb-run"), CONTROLLER)
    assert _admitted(_pod(None, "default-editor"), "system:serviceaccount:kube-system:replicaset")
    assert not _evaluate(
        MUTATING["matchConditions"][0]["expression"], object=_pod(None, "fedemb-run")
    )


HOSTS = next(
    policy["spec"]["validations"]
    for policy in yaml.safe_load_all((INFRA / "kustomize/base/pods.yaml").read_text())
    if policy["metadata"]["name"] == "fedemb-train-jobs"
)


@pytest.fixture
def job(monkeypatch):
    """The TrainJob of a training step."""
    variables = {train_job.HOSTS: "3", train_job.RUNTIME: "fedemb-hosts-0123456789"}
    for name, value in {**variables, **dict.fromkeys(train_job.POD, "x")}.items():
        monkeypatch.setenv(name, value)
    return train_job.train_job()[2]


def test_the_hosts_of_a_training_step_are_admitted(job):
    assert _admitted(job, "system:serviceaccount:fedemb:fedemb-train", HOSTS)


@pytest.mark.parametrize(
    "plant",
    [
        lambda spec: spec["runtimeRef"].update(kind="ClusterTrainingRuntime"),
        lambda spec: spec["runtimeRef"].update(name="torch-distributed"),
        lambda spec: spec["trainer"].update(image="busybox"),
        lambda spec: spec["trainer"].update(command=["sh"]),
        lambda spec: spec.update(podTemplateOverrides=[{"spec": {"serviceAccountName": "a"}}]),
        lambda spec: spec["trainer"]["env"].append({"name": "JAX_PLATFORMS", "value": "cpu"}),
        lambda spec: spec["trainer"].update(env=[{"name": "FEDEMB_CHIEF", "valueFrom": {}}]),
    ],
)
def test_admission_refuses_train_jobs_with_other_settings(job, plant):
    plant(job["spec"])
    assert not _admitted(job, "system:serviceaccount:fedemb:fedemb-train", HOSTS)


# ---- The real steps behind the rights of infra/rights.yaml ----


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
    init_policy(ledger, terms, keys, config.storage.rollback_anchor)


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
    here = tmp_path_factory.mktemp("simulation")
    config = make_config("gs://private-input/images.parquet", **SIMULATION)
    _put_images("gs://private-input/images.parquet", 60, 3, here)
    _put_images("gs://public-input/images.parquet", 4, 3, here)
    report = _simulate(fence, config, here)
    assert report["previous_release"]["old"]
    return fence


@pytest.fixture(scope="module")
def classified(fence, tmp_path_factory):
    """The same of a classifier, trained by DP-SGD."""
    here = tmp_path_factory.mktemp("classifier")
    config = make_config("gs://private-input/classes.parquet", **CLASSIFICATION)
    _put_images("gs://private-input/classes.parquet", 60, 3, here, classes=3)
    report = _simulate(fence, config, here)
    assert report["classes"] == 3
    return fence


def _simulate(fence: Fence, config: RunConfig, here: Path) -> Any:
    """Plan to audit of one run; returns the utility report."""
    from fedemb.steps import (
        audit_privacy,
        partition_users,
        plan_privacy,
        pretrain_public,
        reserve_budget,
        train_model,
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
        pretrain_public.run(config.backbone_config(), here / "pretrained", open_key_store(KEYS))
    if config.evaluation.previous_release:
        seal(context(), here / "pretrained" / "backbone.keras", here / "before")
        place, _, name = PREVIOUS.rpartition("/")
        open_store(place).upload_tree(here / "before", name)
    for _ in range(2):  # a resumed run reserves and partitions again
        with fence.acting("reserve_budget"):
            reserve_budget.run(context())
        with fence.acting("partition_users"):
            partition_users.run(context())
    for _ in range(2):  # so does the trainer, when it is killed after its last act
        with fence.acting("train_model"):
            train_model.run(context())
    with fence.acting("evaluate_model"):
        report = evaluate_model.run(context()).json
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
        "train": "train_model",
        "evaluate": "evaluate_model",
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


@pytest.mark.long
def test_step_rights_are_within_their_group(simulated, classified, released):
    assert not simulated.refused
    granted = {
        group
        for group, rights in GROUPS_RIGHTS.items()
        if any(right not in ("none", {}, []) for name, right in rights.items() if name != "step")
    }
    assert set(GROUPS_RIGHTS) - granted == {"show"}, "it reads the public root alone"
    assert {group for group in GROUPS_RIGHTS if simulated.used[group]} == granted


@pytest.mark.long
@pytest.mark.parametrize("group", GROUPS_RIGHTS)
def test_service_accounts_have_only_requested_rights(group, simulated, classified, released):
    used = simulated.used[group]
    verbs: dict[tuple[str, str], set[str]] = {}
    for kind, thing, verb in used:
        verbs.setdefault((kind, thing), set()).add(verb)
    found: dict[str, Any] = {"step": GROUPS_RIGHTS[group]["step"]}
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
    table = GROUPS_RIGHTS[group]
    ordered = {name: sorted(table[name]) for name in ("input", "signing")}
    assert found == {**table, **ordered}


@pytest.mark.long
def test_planted_table_without_a_right_stops_the_step(fence, monkeypatch):
    """Control for the tests above: the fence refuses what the table does not grant."""
    monkeypatch.setattr(fence, "refused", [])
    monkeypatch.setitem(GROUPS_RIGHTS["partition"], "private", {})
    with fence.acting("partition_users"), pytest.raises(StorageError, match="may not list"):
        open_store("gs://private/first/users").list()
    with fence.acting("partition_users"), pytest.raises(StorageError, match="cannot be reached"):
        open_key_store(KEYS).fetch("signing/policy")
    assert len(fence.refused) == 2
