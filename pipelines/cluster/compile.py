"""Compiles the pipeline for a cluster: resources by profile, images by digest, rules checked.

The other hosts of a training step come from a TrainingRuntime of Kubeflow Trainer. `fedemb compile`
writes it beside the pipeline where the profile gives a step more than one host. Apply it once; the
step then starts a TrainJob of it (`fedemb.training.host_messages`), which names it and nothing
else: image, node pool and resources are decided here. Its pods have no service account, no key and
no store, and a network policy lets them talk to their step alone
(infra/kustomize/base/network_policy.yaml).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import Field, ValidationError

from fedemb.config import Section
from fedemb.errors import ConfigError, InputError
from fedemb.foundation.canonical_json import Json, JsonObject, canonical_json, sha256_hex
from fedemb.foundation.environment import ACCELERATOR, BACKEND, Backend
from fedemb.foundation.files import read_regular, write_bytes
from fedemb.foundation.section import NotYaml, parse_yaml
from fedemb.pipelines.cluster.rules import (
    DIGEST,
    STEP_LABEL,
    executors_of,
    object_at,
    objects_at,
    read_compiled,
    text_at,
    value_at,
    violations,
)
from fedemb.pipelines.graph import Pipeline, build_pipeline
from fedemb.pipelines.steps import PIPELINE
from fedemb.runtime.step import PLACEHOLDER_IMAGES, Image, Step
from fedemb.training import host_messages as train_job
from fedemb.training.host_messages import CONTAINER, HOST_LABEL

if TYPE_CHECKING:
    from kfp.dsl import PipelineTask
    from kfp.dsl.graph_component import GraphComponent

CLOSED: JsonObject = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
AS_NOBODY: JsonObject = {
    "runAsNonRoot": True,
    "runAsUser": 65532,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of a pod."""


def violations_of_hosts(runtime: JsonObject) -> Iterator[str]:
    """Every rule that a TrainingRuntime breaks, as a sentence."""
    for replicated in objects_at(runtime, "spec", "template", "spec", "replicatedJobs"):
        job = object_at(replicated, "template", "spec")
        pod = object_at(job, "template", "spec")
        if value_at(job, "backoffLimit") != 0 or pod.get("restartPolicy") != "Never":
            yield "hosts may be started again, and find no chief; set backoffLimit: 0 and Never"
        if value_at(job, "template", "metadata", "labels", HOST_LABEL) != "train":
            yield f"hosts lack the label {HOST_LABEL}, so no network policy closes them; add it"
        if pod.get("automountServiceAccountToken") is not False or "serviceAccountName" in pod:
            yield "hosts have a service account; they need none, so take it out"
        if any("emptyDir" not in volume for volume in objects_at(pod, "volumes")):
            yield "hosts mount a volume; they hold no keys and no stores, so take it out"
        if not value_at(pod, "securityContext", "runAsNonRoot"):
            yield "hosts may run as root; compile again with `fedemb compile`"
        for container in [*objects_at(pod, "containers"), *objects_at(pod, "initContainers")]:
            image = text_at(container, "image")
            if not DIGEST.search(image):
                yield f"hosts use {image}, not a digest; name it as REF@sha256:..."
            held = [*objects_at(container, "env"), *objects_at(container, "envFrom")]
            if any("value" not in variable for variable in held):
                yield "hosts take a secret or a field of the cluster as variable; take it out"
            closed = object_at(container, "securityContext")
            if {name: closed.get(name) for name in CLOSED} != CLOSED:
                yield "hosts may write to their root or gain rights; compile with `fedemb compile`"


PROFILES = Path(__file__).parent.parent / "profiles"
BY_DIGEST = re.compile(r"^[\w.\-:/]+@sha256:[0-9a-f]{64}$")


class Accelerator(Section):
    """Chips a step asks for."""

    type: Literal["nvidia.com/gpu", "google.com/tpu"]
    count: int
    """Chips per pod."""


class Toleration(Section):
    """A taint the step's pod may run on."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] = "NoSchedule"


class SecretEnv(Section):
    """A Kubernetes secret whose keys become environment variables."""

    name: str
    keys: dict[str, str]
    """Key in the secret -> environment variable."""
    optional: bool = False
    """Whether the pod starts without the keys that the secret does not have."""


class StepResources(Section):
    """Resources and placement of the pod of one step."""

    cpu: str
    memory: str
    timeout_seconds: int
    shared_memory: str | None = None
    """Size of /dev/shm; null: the node's default."""
    accelerator: Accelerator | None = None
    node_selector: dict[str, str] = Field(default={})
    tolerations: tuple[Toleration, ...] = ()
    hosts: Annotated[int, Field(ge=1, le=256)] = 1
    """Pods that train together, each with these resources: steps that train, on JAX alone. More
    than one needs Kubeflow Trainer 2 and the file of hosts written beside the pipeline."""
    image: Image | None = None
    """Image instead of the step's own: `cpu` for a step that runs beside the accelerators."""
    environment: dict[str, str] = Field(default={})
    """Plain variables, such as the address of an object store; never a secret."""
    secrets: tuple[SecretEnv, ...] = ()
    image_pull_secrets: tuple[str, ...] = ()
    """Kubernetes secrets of a private registry."""
    volume_claim: dict[str, str] = Field(default={})
    """Claim name -> mount path, for stores on a volume."""


class Profile(Section):
    """A cluster's resources, as data."""

    group_secret: SecretEnv | None = None
    """Access key of each group of steps: the secret `<name>-<group>`, for its steps alone."""
    key_volumes: str | None = None
    """Where the key store is mounted, if it lies on volumes: to each step what its rights name."""

    backend: Backend | None = None
    """The one that this cluster's image `trainer` has; a run of the other one is refused when it is
    planned. Null: both."""
    steps: dict[str, StepResources]
    """Step name -> resources; `default` for a step without an entry."""
    ttl_seconds_after_finished: int
    """Seconds after which finished workflows are removed from the cluster, however they ended."""
    namespace: str | None = None
    """Namespace of the runs; null: that of the pod that submits them, or `fedemb`."""
    accepts: tuple[str, ...] = ()
    """Findings of `fedemb doctor` that are unsafe, and that this cluster lives with."""
    packages: tuple[str, ...] = ()
    """SHA-256 digests of the packages that `fedemb submit` may send; empty: any package."""


def load_profile(*sources: str | Path) -> Profile:
    """Reads profiles by name (cpu, gpu, tpu) or path, each laid over the ones before it.

    An entry is `default`, a kind of resources that steps declare (`train`, say), or one step. It
    says only how it differs from the more general ones of the same file, and a later file only how
    it differs from the earlier ones: mappings are merged, everything else is replaced.

    Raises:
      ConfigError: the profile does not exist or is not valid.
    """
    from fedemb.pipelines.steps import all_steps

    tree: JsonObject = {}
    known = all_steps()
    kinds = sorted({step.resources for step in known.values()})
    for source in sources:
        layer = _read_profile(source)
        steps = object_at(layer.pop("steps", None))
        if unknown := sorted(set(steps) - {*known, *kinds, "default"}):
            raise ConfigError(
                f"Profile {source} has the unknown step {unknown[0]}. Use default, one of the "
                f"kinds {', '.join(kinds)}, or one of the steps {', '.join(known)}."
            )
        before = object_at(tree, "steps")
        basis = before.get("default", {})
        merged: JsonObject = {"default": _merged(basis, steps.get("default", {}))}
        for name, step in known.items():
            entry = before.get(name, basis)
            for general in ("default", step.resources, name):
                entry = _merged(entry, steps.get(general, {}))
            merged[name] = entry
        tree = {**tree, **layer, "steps": merged}
    try:
        return Profile.model_validate(tree)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        listed = ", ".join(str(source) for source in sources)
        raise ConfigError(
            f"Profile {listed} is not valid: {where}: {problem['msg']}. Correct the profile."
        ) from error


def _read_profile(source: str | Path) -> JsonObject:
    path = Path(source)
    if not path.suffix:
        path = PROFILES / f"{source}.yaml"
    if not path.is_file():
        names = ", ".join(sorted(item.stem for item in PROFILES.glob("*.yaml")))
        raise ConfigError(f"no profile {source}; give a YAML file or one of {names}")
    try:
        tree = parse_yaml(read_regular(path).decode(), aliases=True)
        if not isinstance(tree, dict) or not isinstance(tree.get("steps") or {}, dict):
            raise ConfigError(
                f"Profile {path.name} is not a mapping. See {PROFILES / 'cpu.yaml'} for an example."
            )
    except NotYaml as error:
        raise ConfigError(
            f"profile {path.name} is {error}; correct it and compile again"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"profile {path.name} cannot be read: {why}; give a YAML file") from error
    return tree


def _merged(under: Json, over: Json) -> Json:
    if isinstance(under, dict) and isinstance(over, dict):
        return {**under, **{name: _merged(under.get(name), over[name]) for name in over}}
    return over


def parse_images(options: Sequence[str]) -> dict[str, str]:
    """Turns `NAME=REF@sha256:...` (or one bare reference for all three) into a mapping.

    Raises:
      ConfigError: a name is unknown or missing, or a reference has no digest.
    """
    images: dict[str, str] = {}
    for option in options:
        name, separator, reference = option.partition("=")
        if not separator:
            images.update(dict.fromkeys(PLACEHOLDER_IMAGES, option))
            continue
        if name not in PLACEHOLDER_IMAGES:
            raise ConfigError(f"Unknown image {name}. Pass one of {', '.join(PLACEHOLDER_IMAGES)}.")
        images[name] = reference
    for name in PLACEHOLDER_IMAGES:
        if name not in images:
            raise ConfigError(f"No image for {name}. Pass --image {name}=REF@sha256:...")
        if not BY_DIGEST.match(images[name]):
            raise ConfigError(
                f"Image {images[name]!r} has no digest, and a tag can change during a run. "
                "Pass REF@sha256:<64 hexadecimal digits>."
            )
    return images


def _compiled(graph: GraphComponent) -> list[JsonObject]:
    """Returns the documents that KFP's compiler writes for a pipeline."""
    from kfp import compiler

    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(graph, str(raw))
        return read_compiled(raw)


def _write_yaml(output: Path, documents: list[JsonObject]) -> None:
    write_bytes(output, yaml.safe_dump_all(documents, sort_keys=True).encode())


def compile_pipeline(
    output: Path,
    *,
    profile: str | Path | Sequence[str | Path],
    images: Mapping[str, str],
    pipeline: Pipeline = PIPELINE,
) -> None:
    """Writes the pipeline's YAML, if it keeps every rule of `fedemb.pipelines.cluster.rules`.

    Where a step has several hosts, `<output>.hosts.yaml` beside it makes them. Several profiles are
    laid over each other, see `load_profile`; `images` are references with a digest.

    Raises:
      ConfigError: the profile is wrong or the result breaks a rule. Nothing is written.
      InputError: kfp was installed without its part for Kubernetes, as in the image `light`.
    """
    from kfp import dsl

    _require_kubernetes()
    profiles = [profile] if isinstance(profile, str | Path) else profile
    resources = load_profile(*profiles)
    seconds = resources.ttl_seconds_after_finished
    runtimes: dict[str, JsonObject] = {}

    def configure(step: Step, task: PipelineTask) -> None:
        _configure(step, task, resources)
        if resources.steps[step.name].hosts > 1:
            runtime = _runtime(step, resources, images)
            runtimes[text_at(runtime, "metadata", "name")] = runtime
            _call_hosts(task, resources.steps[step.name].hosts, runtime)

    graph = build_pipeline(
        pipeline,
        configure=configure,
        with_exit=True,
        pipeline_config=dsl.PipelineConfig(
            ttl_seconds_after_finished=seconds,
            # Kubeflow's defaults name these two, and they win over the general one.
            ttl_seconds_after_success=seconds,
            ttl_seconds_after_failure=seconds,
        ),
    )
    documents = _compiled(graph)
    _pin_images(documents[0], images)
    problems = violations(documents)
    for runtime in runtimes.values():
        problems += violations_of_hosts(runtime)
    if problems:
        raise ConfigError(
            "The compiled pipeline breaks these rules. Correct the configuration or profile:",
            *problems,
        )
    _write_yaml(output, documents)
    if runtimes:
        _write_yaml(output.with_suffix(".hosts.yaml"), list(runtimes.values()))


def _require_kubernetes() -> None:
    try:
        from kfp import kubernetes  # noqa: F401  # pyright: ignore[reportUnusedImport] - used by _configure
    except ImportError as error:
        raise InputError(
            "The package kfp[kubernetes] is not installed. Use the development environment or the "
            "image cpu."
        ) from error


def _runtime(step: Step, profile: Profile, images: Mapping[str, str]) -> JsonObject:
    """Where the other hosts of a step are made from.

    Its name has the digest of the rest, so that a pipeline finds its own.
    """
    wanted = profile.steps[step.name]
    if step.resources != "train" or profile.backend != "jax":
        raise ConfigError(
            f"{step.name} has hosts={wanted.hosts}, and only a step that trains on JAX may have "
            "several; set `backend: jax` in the profile, or hosts: 1"
        )
    labels: JsonObject = {HOST_LABEL: "train"}
    pod = _host_pod(wanted, images[wanted.image or step.image])
    job: JsonObject = {
        "backoffLimit": 0,  # a host that comes again finds no chief
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    ancestor: JsonObject = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template: JsonObject = {"metadata": {"labels": ancestor}, "spec": job}
    spec: JsonObject = {
        "mlPolicy": {"numNodes": 1, "jax": {}},
        "template": {"spec": {"replicatedJobs": [{"name": CONTAINER, "template": template}]}},
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {
            "name": f"fedemb-hosts-{sha256_hex(canonical_json(spec))[:10]}",
            "namespace": profile.namespace or "fedemb",
            "labels": {"trainer.kubeflow.org/framework": "jax"},
        },
        "spec": spec,
    }


def _host_pod(wanted: StepResources, image: str) -> JsonObject:
    """Returns the pod of one host: no account, no key, no store."""
    resources: JsonObject = {"cpu": wanted.cpu, "memory": wanted.memory}
    if wanted.accelerator:
        resources[wanted.accelerator.type] = str(wanted.accelerator.count)
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}]
    mounts: list[Json] = [{"name": "tmp", "mountPath": "/tmp"}]
    if wanted.shared_memory:
        limited: JsonObject = {"medium": "Memory", "sizeLimit": wanted.shared_memory}
        volumes.append({"name": "shm", "emptyDir": limited})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": AS_NOBODY,
        "nodeSelector": {**wanted.node_selector},
        "tolerations": [taint.model_dump(exclude_none=True) for taint in wanted.tolerations],
        "volumes": volumes,
        "containers": [
            {
                "name": CONTAINER,
                "image": image,
                "command": ["python3", "-m", "fedemb.training.hosts"],
                "env": [
                    {"name": name, "value": value} for name, value in _promised(wanted).items()
                ],
                "resources": {"limits": resources, "requests": resources},
                "securityContext": CLOSED,
                "volumeMounts": mounts,
            }
        ],
    }


def _call_hosts(task: PipelineTask, hosts: int, runtime: JsonObject) -> None:
    """Returns the arguments that the step needs to start them."""
    from kfp import kubernetes

    task.set_env_variable(train_job.HOSTS, str(hosts))
    task.set_env_variable(train_job.RUNTIME, text_at(runtime, "metadata", "name"))
    for variable, place in train_job.POD.items():
        kubernetes.use_field_path_as_env(task, variable, place)


def _promised(wanted: StepResources) -> dict[str, str]:
    """Tells a process what it was given, so that it can miss it."""
    return {ACCELERATOR: wanted.accelerator.type} if wanted.accelerator else {}


def _configure(step: Step, task: PipelineTask, profile: Profile) -> None:
    from kfp import kubernetes

    wanted = profile.steps[step.name]
    task.set_cpu_request(wanted.cpu).set_cpu_limit(wanted.cpu)
    task.set_memory_request(wanted.memory).set_memory_limit(wanted.memory)
    kubernetes.set_timeout(task, wanted.timeout_seconds)
    kubernetes.add_pod_label(task, STEP_LABEL, step.slug)
    kubernetes.set_security_context(task, run_as_non_root=True)
    kubernetes.empty_dir_mount(task, "tmp", "/tmp")  # its root is read-only (infra/kustomize/base)
    if not step.cached:
        task.set_retry(0)  # said, because Kubeflow's default retries what says nothing
    if wanted.accelerator:
        task.set_accelerator_type(wanted.accelerator.type)
        task.set_accelerator_limit(wanted.accelerator.count)
    for key, value in wanted.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in wanted.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump(exclude_none=True))
    if wanted.image:
        task.set_container_image(PLACEHOLDER_IMAGES[wanted.image])
    known = _promised(wanted)
    if profile.backend and (step.resources == "train" or step.name == "plan_privacy"):
        known[BACKEND] = profile.backend
    for variable, value in {**wanted.environment, **known}.items():
        task.set_env_variable(variable, value)
    _give_access(step, task, profile)
    if wanted.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(wanted.image_pull_secrets))
    if wanted.shared_memory:
        kubernetes.empty_dir_mount(
            task, "shm", "/dev/shm", medium="Memory", size_limit=wanted.shared_memory
        )


def _give_access(step: Step, task: PipelineTask, profile: Profile) -> None:
    """Mounts and names what a step may have: secrets, volumes, and the keys of its group alone."""
    from kfp import kubernetes

    from fedemb.pipelines.steps import key_claims

    wanted = profile.steps[step.name]
    secrets, claims = list(wanted.secrets), dict(wanted.volume_claim)
    if profile.group_secret:
        name = f"{profile.group_secret.name}-{step.group}"
        secrets.append(SecretEnv(name=name, keys=profile.group_secret.keys))
    if profile.key_volumes:
        claims |= {
            claim: f"{profile.key_volumes}/{folder}"
            for claim, folder in key_claims(step.rights).items()
        }
    for secret in secrets:
        kubernetes.use_secret_as_env(task, secret.name, secret.keys, optional=secret.optional)
    for claim, mount in claims.items():
        kubernetes.mount_pvc(task, claim, mount)


def _pin_images(spec: JsonObject, images: Mapping[str, str]) -> None:
    references = {PLACEHOLDER_IMAGES[name]: images[name] for name in PLACEHOLDER_IMAGES}
    for executor in executors_of(spec).values():
        container = object_at(executor, "container")
        image = text_at(container, "image")
        container["image"] = references.get(image, image)
