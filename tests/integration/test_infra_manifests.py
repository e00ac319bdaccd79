"""What of infra/ can be checked without a cluster or a cloud.

One table of rights (infra/rights.yaml) stands behind everything, so everything is held against it.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

INFRA = Path(__file__).parents[2] / "infra"
OVERLAYS = ["gke", "s3"]
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


def test_manifests_are_valid_by_the_schemas_of_kubernetes(manifests):
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="the package kubernetes-validate is not installed"
    )
    for manifest in manifests:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_every_step_is_in_exactly_one_group():
    from fedemb.pipelines.steps import all_steps

    found = [step for group in GROUPS.values() for step in group["steps"]]
    assert sorted(found) == sorted(all_steps())


def test_each_group_has_its_account_and_the_admission_policies_map_steps_to_it(manifests):
    accounts = _of_kind(manifests, "ServiceAccount")
    assert set(accounts) - {"fedemb-owner"} == {f"fedemb-{group}" for group in [*GROUPS, "run"]}
    expected = {
        step.replace("_", "-"): f"fedemb-{group}"
        for group, rights in GROUPS.items()
        for step in rights["steps"]
    }
    for kind in ("MutatingAdmissionPolicy", "ValidatingAdmissionPolicy"):
        policy = _of_kind(manifests, kind)["fedemb-step-accounts"]
        assert policy["spec"]["failurePolicy"] == "Fail"
        mapping = policy["spec"]["variables"][0]["expression"]
        assert dict(re.findall(r"'([\w-]+)':\s*'([\w-]+)'", mapping)) == expected
        assert f"{kind}Binding" in {item["kind"] for item in manifests}


def _compiled(output: Path, profile: Any) -> dict[str, dict[str, Any]]:
    """Executor -> what its pod is given on the cluster, of all pipelines."""
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images
    from fedemb.pipelines.steps import PIPELINES

    images = parse_images(["registry.example/fedemb@sha256:" + "a" * 64])
    executors: dict[str, dict[str, Any]] = {}
    for pipeline in PIPELINES:
        compile_pipeline(output, profile=profile, images=images, pipeline=pipeline)
        _, platform = yaml.safe_load_all(output.read_text())
        found = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for name, options in found.items():
            assert executors.setdefault(name, options) == options, "a step is given one thing"
    return executors


def test_nothing_comes_in_but_between_hosts_and_stores_are_the_only_way_out(manifests):
    from fedemb.pipelines.steps import all_steps
    from fedemb.training import host_messages as train_job

    policies = _of_kind([item for item in manifests], "NetworkPolicy")
    closed = policies["fedemb-nothing-else"]["spec"]
    assert closed == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    opened = {name for name, policy in policies.items() if "ingress" in policy["spec"]}
    assert opened == {"fedemb-ui-artifact", "fedemb-chief", "fedemb-hosts"}
    hosts = {"matchLabels": {train_job.HOST_LABEL: "train"}}
    steps = [name.replace("_", "-") for name in sorted(all_steps()) if "train_dp" in name]
    key = "fedemb.dev/step"
    chief = {"matchExpressions": [{"key": key, "operator": "In", "values": steps}]}
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
    hard = _of_kind(manifests, "ResourceQuota")["fedemb"]["spec"]["hard"]
    assert int(hard["persistentvolumeclaims"]) > len(claims)
    profile = load_profile(*profiles)
    assert profile.steps["train_dp_fedemb"].accelerator is not None, "laid over, not in place of"


# ---- the table of rights itself --------------------------------------------------------------


def test_no_policy_is_called_like_a_folder_that_rights_go_by():
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


def test_bucket_policies_of_s3_let_nobody_replace_a_record():
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
