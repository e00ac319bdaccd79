"""Every rule of the compiled pipeline, and that it notices the change it stands against."""

import copy
from functools import cache, partial
from pathlib import Path

import pytest

from fedemb.errors import ConfigError
from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images, violations_of_hosts
from fedemb.pipelines.cluster.rules import RULES, read_compiled, violations
from fedemb.training import host_messages as train_job

GOLDEN = Path(__file__).parents[1] / "golden"
IMAGES = [
    f"{name}=registry.example/fedemb-{name}@sha256:" + digit * 64
    for name, digit in (("light", "a"), ("cpu", "b"), ("trainer", "c"))
]


def _compile(profile, folder):
    path = folder / "pipeline.yaml"
    compile_pipeline(path, profile=profile, images=parse_images(IMAGES))
    return path


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Compiles a profile, once."""

    @cache
    def of(profile):
        return _compile(profile, tmp_path_factory.mktemp("compiled"))

    return of


@pytest.fixture(scope="module", params=["cpu", "gpu", "tpu"])
def compiled(request, package):
    return read_compiled(package(request.param))


@pytest.fixture(scope="module")
def compiled_once(package):
    return read_compiled(package("gpu"))


KINDS = ("Artifact", "Model", "Dataset", "HTML", "Markdown", "Metrics", "ClassificationMetrics")
NATIVE = {f"system.{kind}" for kind in KINDS}
"""Types of Kubeflow's own artifact API, which replaces ML Metadata (kubeflow/pipelines, 13986)."""


def test_outputs_have_types_of_the_artifact_api_that_replaces_ml_metadata(compiled_once):
    components = compiled_once[0]["components"].values()
    outputs = [component.get("outputDefinitions", {}) for component in components]
    artifacts = [item for found in outputs for item in found.get("artifacts", {}).values()]
    titles = {item["artifactType"]["schemaTitle"] for item in artifacts}
    assert {"system.HTML", "system.Markdown", "system.Metrics"} <= titles <= NATIVE


def _tasks(documents):
    """All steps but the one that runs at the exit of their group."""
    return documents[0]["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def _task(documents, name):
    return _tasks(documents)[name]


def _container(documents, name):
    executors = documents[0]["deploymentSpec"]["executors"]
    return executors[f"exec-{name}"]["container"]


def _outputs(documents, name):
    return documents[0]["components"][f"comp-{name}"]["outputDefinitions"]


def _options(documents, name):
    platform = documents[1]["platforms"]["kubernetes"]
    return platform["deploymentSpec"]["executors"][f"exec-{name}"]


def _grouped(documents, name, inner, **options):
    """Puts a step into a group of its own, as kfp writes a loop or a condition."""
    tasks = _tasks(documents)
    documents[0]["components"][f"comp-{name}"] = {"dag": {"tasks": {inner: tasks.pop(inner)}}}
    component = {"componentRef": {"name": f"comp-{name}"}, "taskInfo": {"name": name}}
    tasks[name] = {**component, **options}


def _retry_far_around_training(documents):
    _grouped(documents, "group", "train-model")
    _grouped(documents, "outer", "group", retryPolicy={"maxRetryCount": 1})


def _renamed(documents, name, alias):
    """The same step under another name, as kfp writes it when a component is used twice."""
    spec = documents[0]
    tasks = _tasks(documents)
    task = tasks.pop(name)
    for kind, bag in (
        ("comp", spec["components"]),
        ("exec", spec["deploymentSpec"]["executors"]),
        ("exec", documents[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]),
    ):
        bag[f"{kind}-{alias}"] = bag.pop(f"{kind}-{name}")
    spec["components"][f"comp-{alias}"]["executorLabel"] = f"exec-{alias}"
    task["componentRef"]["name"] = f"comp-{alias}"
    tasks[alias] = task
    return task


def _cache_training_by_another_name(documents):
    _renamed(documents, "train-model", "warm-up")["cachingOptions"] = {"enableCache": True}


def _retry_training_by_another_name(documents):
    _renamed(documents, "train-model", "for-loop-2")["retryPolicy"] = {"maxRetryCount": 2}


def _cache_a_step_nobody_knows(documents):
    task = _renamed(documents, "audit-privacy", "look-at-users")
    _container(documents, "look-at-users")["args"] = ["--function_to_execute", "look_at_users"]
    task["cachingOptions"] = {"enableCache": True}


def _train_twice(documents):
    tasks = _tasks(documents)
    tasks["train-again"] = copy.deepcopy(_task(documents, "train-model"))


def _stale_import(documents):
    executors = documents[0]["deploymentSpec"]["executors"]
    executors["exec-importer"] = {"importer": {"artifactUri": {"constant": "gs://b/x"}}}


def _secret_parameter(documents):
    parameters = documents[0]["root"]["inputDefinitions"]["parameters"]
    parameters["signing_secret"] = {"parameterType": "STRING"}


def _release_by_another_name(documents):
    task = _renamed(documents, "release-model", "publish")
    _tasks(documents)["publish"] = task
    task["inputs"]["artifacts"]["verdict"]["taskOutputArtifact"]["producerTask"] = "plan-privacy"


def _second_release_without_gate(documents):
    tasks = _tasks(documents)
    tasks["release-model-2"] = copy.deepcopy(tasks["release-model"])
    verdict = tasks["release-model-2"]["inputs"]["artifacts"]["verdict"]
    verdict["taskOutputArtifact"]["producerTask"] = "plan-privacy"


def _release_beside_gate(documents):
    _task(documents, "release-model")["dependentTasks"].remove("gate-release")


def _foreign_step_may_release(documents):
    task = copy.deepcopy(_task(documents, "evaluate-model"))
    task["inputs"]["parameters"]["releases"] = {"componentInputParameter": "releases"}
    _tasks(documents)["evaluate-model"] = task


def _raw_output(documents, name):
    outputs = _outputs(documents, "train-model")["artifacts"]
    outputs[name] = copy.deepcopy(outputs["model"])


def _gate_in_place_of_the_step_at_exit(documents):
    spec = documents[0]
    at_exit = spec["root"]["dag"]["tasks"]["show-outcome"]
    at_exit["componentRef"]["name"] = "comp-gate-release"


CACHED, ON_FAILURE = {"enableCache": True}, {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
VERDICT = "inputs/artifacts/verdict/taskOutputArtifact/producerTask"
LEDGER = {"runtimeValue": {"constant": "https://me:pass@store.example/ledger"}}
GONE = object()
SET = [
    ("no_cache", _task, "train-model", "cachingOptions", CACHED),
    ("no_cache", _task, "reserve-budget", "cachingOptions", CACHED),
    ("no_cache_key", _task, "pretrain-public", "cachingOptions/cacheKey", "mine"),
    ("no_retry", _task, "train-model", "retryPolicy", {"maxRetryCount": 2}),
    ("no_retry", _task, "train-model", "retryPolicy", GONE),
    ("no_repetition", _task, "train-model", "parameterIterator", {"itemInput": "seed"}),
    ("images_by_digest", _container, "gate-release", "image", "registry.example/fedemb:latest"),
    ("no_secrets", _container, "train-model", "env", [{"name": "AWS_SECRET", "value": "a"}]),
    ("no_secrets", _task, "train-model", "inputs/parameters/ledger", LEDGER),
    ("release_behind_gate", _task, "release-model", VERDICT, "plan-privacy"),
    ("release_behind_gate", _task, "release-model", "triggerPolicy", ON_FAILURE),
    ("no_raw_outputs", _outputs, "train-model", "parameters", {"clients": {}}),
    ("harmless_exit_handlers", _task, "account-privacy", "triggerPolicy", ON_FAILURE),
    (
        *("closed_logs", _container, "train-model", "env"),
        [{"name": "FEDEMB_LOG", "value": "everything"}],
    ),
    (
        *("labelled_by_step", _options, "evaluate-model", "podMetadata/labels"),
        {"fedemb.dev/step": "train-model"},
    ),
    ("labelled_by_step", _options, "gate-release", "podMetadata", GONE),
    (
        *("restricted_pods", _options, "train-model", "securityContext"),
        {"runAsNonRoot": True, "runAsUser": "0"},
    ),
    ("restricted_pods", _options, "gate-release", "securityContext", GONE),
    ("restricted_pods", _options, "gate-release", "emptyDirMounts", GONE),
    (
        *("no_debug_pause", _container, "train-model", "env"),
        [{"name": "ARGO_DEBUG_PAUSE_AFTER", "value": "true"}],
    ),
    ("strict_protos", _task, "gate-release", "retries", 3),
    ("strict_protos", _options, "gate-release", "privileged", True),
]
"""Rule, part of a step, step, field, and what is put there, which the rule must notice."""


def _set(documents, part, step, field, value):
    place = part(documents, step)
    *path, last = field.split("/")
    for name in path:
        place = place[name]
    if value is GONE:
        del place[last]
    else:
        place[last] = value


PLANTED = {
    "no_cache": [
        partial(_grouped, name="group", inner="train-model", cachingOptions=CACHED),
        _cache_training_by_another_name,
        _cache_a_step_nobody_knows,
    ],
    "no_retry": [
        partial(_grouped, name="loop", inner="train-model", retryPolicy={"maxRetryCount": 1}),
        _retry_far_around_training,
        _retry_training_by_another_name,
    ],
    "no_repetition": [_train_twice],
    "no_stale_import": [_stale_import],
    "no_secrets": [_secret_parameter],
    "release_behind_gate": [
        _release_by_another_name,
        _second_release_without_gate,
        _release_beside_gate,
        _foreign_step_may_release,
    ],
    "no_raw_outputs": [partial(_raw_output, name=name) for name in ("diagnostics", "extras")],
    "harmless_exit_handlers": [
        _gate_in_place_of_the_step_at_exit,
        partial(_grouped, name="exit", inner="release-model", triggerPolicy=ON_FAILURE),
    ],
}
"""Rule -> other changes it must notice."""


def test_compiled_pipeline_violates_no_rule(compiled):
    assert violations(compiled) == []


def test_every_rule_has_a_planted_change():
    assert {*PLANTED, *(row[0] for row in SET)} == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("rule", "plant"),
    [
        *((rule, plant) for rule, plants in PLANTED.items() for plant in plants),
        *((rule, partial(_set, part=p, step=s, field=f, value=v)) for rule, p, s, f, v in SET),
    ],
)
def test_rule_notices_its_planted_change(compiled_once, rule, plant):
    changed = copy.deepcopy(compiled_once)
    plant(changed)
    named = {item.__name__: item for item in RULES}[rule]
    assert list(named(*changed))


@pytest.mark.parametrize("reference", ["registry.example/fedemb:latest", "fedemb", "x@sha256:12"])
def test_image_without_digest_is_refused(reference):
    with pytest.raises(ConfigError, match="has no digest"):
        parse_images([reference])


ACCELERATED = {
    "cpu": (None, set()),
    "gpu": ("nvidia.com/gpu", {"reserve", "train", "evaluate", "audit"}),
    "tpu": ("google.com/tpu", {"reserve", "train"}),
}
"""Profile -> chips, and the steps that get them."""


@pytest.mark.parametrize("profile", ACCELERATED)
def test_only_compute_steps_get_accelerators_and_their_node_pools(profile, package):
    chips, steps = ACCELERATED[profile]
    spec, platform = read_compiled(package(profile))
    executors = spec["deploymentSpec"]["executors"]
    nodes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    found = {
        name: executor["container"]["resources"]["accelerator"]["type"]
        for name, executor in executors.items()
        if "accelerator" in executor["container"]["resources"]
    }
    assert {name.split("-")[1] for name in found} == steps
    assert set(found.values()) == ({chips} if chips else set())
    assert {name for name, options in nodes.items() if "nodeSelector" in options} == set(found)
    for name in found:
        assert nodes[name]["tolerations"] == [
            {"key": chips, "operator": "Exists", "effect": "NoSchedule"}
        ]
        assert executors[name]["container"]["image"].startswith("registry.example/fedemb-trainer@")
        assert _variables(executors[name])["FEDEMB_ACCELERATOR"] == chips
    backends = {name: _variables(executors[name]).get("FEDEMB_BACKEND") for name in executors}
    told = {name for name, backend in backends.items() if backend == "jax"}
    assert told == ({"exec-plan-privacy", "exec-train-model"} if chips else set())


def _variables(executor):
    return {one["name"]: one["value"] for one in executor["container"].get("env", [])}


HOSTS = "steps: {train: {hosts: 3, secrets: [{name: s3, keys: {a: B}}]}}"


@pytest.fixture
def several(tmp_path):
    """A pipeline whose training step has three hosts, and what they are made from."""
    path = _compile(["gpu", _profile(tmp_path, HOSTS)], tmp_path)
    (runtime,) = read_compiled(path.with_suffix(".hosts.yaml"))
    return read_compiled(path), runtime


def test_multi_host_training_step_matches_its_training_runtime(several):
    (spec, platform), runtime = several
    train = spec["deploymentSpec"]["executors"]["exec-train-model"]
    variables = _variables(train)
    assert variables[train_job.HOSTS] == "3"
    assert variables[train_job.RUNTIME] == runtime["metadata"]["name"]
    options = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    fields = options["exec-train-model"]["fieldPathAsEnv"]
    assert {field["name"]: field["fieldPath"] for field in fields} == train_job.POD
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == train["container"]["image"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {one["name"] for one in container["env"]} == {"FEDEMB_ACCELERATOR"}, "and no secret"
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    assert not list(violations_of_hosts(runtime))
    others = [name for name in spec["deploymentSpec"]["executors"] if name != "exec-train-model"]
    assert not [name for name in others if "fieldPathAsEnv" in options[name]]


def _pod(runtime):
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


OF_HOSTS = [
    (lambda pod: pod["containers"][0].update(image="fedemb:latest"), "not a digest"),
    (lambda pod: pod.update(serviceAccountName="fedemb-train"), "service account"),
    (lambda pod: pod.pop("automountServiceAccountToken"), "service account"),
    (lambda pod: pod["volumes"].append({"secret": {"secretName": "keys"}}), "mount a volume"),
    (
        lambda pod: pod["containers"][0]["env"].append({"name": "K", "valueFrom": {}}),
        "take a secret",
    ),
    (lambda pod: pod["containers"][0].update(envFrom=[{"secretRef": {}}]), "take a secret"),
    (lambda pod: pod.update(securityContext={}), "run as root"),
    (lambda pod: pod["containers"][0].pop("securityContext"), "gain rights"),
    (lambda pod: pod.update(restartPolicy="OnFailure"), "started again"),
]


@pytest.mark.parametrize(("plant", "sentence"), OF_HOSTS)
def test_rule_of_hosts_notices_its_planted_change(several, plant, sentence):
    _, runtime = several
    plant(_pod(runtime))
    (problem,) = violations_of_hosts(runtime)
    assert sentence in problem


def test_hosts_without_the_network_policy_label_are_detected(several):
    _, runtime = several
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    del job["template"]["spec"]["template"]["metadata"]["labels"]
    assert "no network policy closes them" in next(violations_of_hosts(runtime))


@pytest.mark.parametrize("text", ["steps: {train: {hosts: 2}}", "steps: {embed: {hosts: 2}}"])
def test_only_a_step_that_trains_on_jax_has_several_hosts(tmp_path, text):
    profiles = ["cpu" if "train" in text else "gpu", _profile(tmp_path, text)]
    with pytest.raises(ConfigError, match="only a step that trains on JAX may have several"):
        _compile(profiles, tmp_path)


def _profile(folder, text):
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


def test_second_profile_overrides_only_the_fields_it_sets(tmp_path):
    over = _profile(
        tmp_path,
        """
steps:
  default:
    environment: {AWS_ENDPOINT_URL: "https://minio.example:9000"}
    image_pull_secrets: [registry]
  train_model:
    node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-80gb}
    secrets: [{name: fedemb-s3-train, keys: {access_key: AWS_ACCESS_KEY_ID}}]
    volume_claim: {fedemb-keys: /keys}
  gate_release: {timeout_seconds: 60}
""",
    )
    spec, platform = read_compiled(_compile(["gpu", over], tmp_path))
    nodes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    for executor in spec["deploymentSpec"]["executors"].values():
        assert _variables(executor)["AWS_ENDPOINT_URL"] == "https://minio.example:9000"
    assert all(options["imagePullSecret"] for options in nodes.values())
    train = nodes["exec-train-model"]
    assert train["nodeSelector"]["labels"] == {
        "cloud.google.com/gke-accelerator": "nvidia-h100-80gb"
    }
    assert train["pvcMount"][0]["mountPath"] == "/keys"
    assert train["secretAsEnv"][0]["keyToEnv"] == [
        {"envVar": "AWS_ACCESS_KEY_ID", "secretKey": "access_key"}
    ]
    assert train["activeDeadlineSeconds"] == "604800"
    assert nodes["exec-gate-release"]["activeDeadlineSeconds"] == "60"
    assert "secretAsEnv" not in nodes["exec-gate-release"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps: {trains: {cpu: '1'}}", "unknown step trains"),
        ("steps: {default: {memory: 1Gi}}", "cpu"),
        (
            "steps: {default: {cpu: '1', memory: 1Gi, timeout_seconds: 9, accelerator: {type: x}}}",
            "accelerator",
        ),
        ("- steps", "not a mapping"),
        ("steps: [", "not valid YAML"),
        ("steps: {default: {cpu: '1', cpu: '64'}}", "'cpu' twice, again at line 1"),
    ],
)
def test_invalid_profiles_are_refused(tmp_path, text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        _compile([_profile(tmp_path, text)], tmp_path)


def test_a_secret_among_the_plain_variables_is_refused(tmp_path):
    over = _profile(tmp_path, "steps: {default: {environment: {AWS_SECRET_ACCESS_KEY: abc}}}")
    with pytest.raises(ConfigError, match="in plain text; name a secret"):
        _compile(["cpu", over], tmp_path)


def test_compiled_pipeline_matches_the_golden_file(package, request):
    text = "".join(
        line
        for line in package("cpu").read_text().splitlines(True)
        if not line.startswith("sdkVersion")
    )
    golden = GOLDEN / "pipeline_cpu.yaml"
    if request.config.getoption("--force-regen"):
        golden.write_text(text)
    assert text == golden.read_text(), "the compiled pipeline changed; review with `make golden`"
