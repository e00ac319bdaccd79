"""Multi-host training on JAX: host discovery, and messages from the chief to the other hosts.

Every host runs one process. Process 0, the chief, is the ordinary training step. All others run

    python -m fedemb.training.hosts

and have only the units of the current step: coins, keys, noise, ledger and server state are only on
the chief. The chief sends each step to all hosts, and all hosts sum their integers. One process and
many processes therefore give the same bits (on processors of one kind).

The variables of Kubeflow Trainer's JAX runtime identify a process; process 0 is the chief:

    JAX_COORDINATOR_ADDRESS=host0:2222  JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0

If `FEDEMB_CHIEF=address:port` is also set, they count only the other hosts, which a pipeline's step
started (`training.train_job`).

The traffic is not encrypted, not authenticated, and un-noised: images are sent out, and clipped
sums come back. Use a network policy that admits only the hosts of this job.
"""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from fedemb.errors import ConfigError, StorageError
from fedemb.foundation import step_logging as events
from fedemb.foundation.canonical_json import JsonObject

_LOG = logging.getLogger(__name__)
CHIEF = "FEDEMB_CHIEF"
"""Environment variable: address and port of a chief that the other variables do not count."""
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LOST_HOST_TERMS = (
    "Gloo",
    "NCCL",
    "UNAVAILABLE",
    "ABORTED",
    "Connection",
    "Heartbeat",
    "heartbeat",
)
"""Terms in JAX errors after a host was lost."""
LOST = (
    "A host of the training job was lost; the current round was not committed. Start the hosts "
    "again and resume the run."
)
_CONNECT_SECONDS = 1800
"""Timeout until all hosts are connected, in seconds; a new node may have to start."""
_RECEIVE_MILLISECONDS = 24 * 3600 * 1000
"""Timeout of the other hosts for a message of the chief, in milliseconds."""
_LEAVE_MILLISECONDS = 10_000
"""Timeout of the final barrier, in milliseconds."""
_message_numbers = count(0)
"""Message numbers; chief and other hosts count the same messages."""


class JobHost(NamedTuple):
    """A process of a job with several hosts."""

    address: str
    """Address of the chief with port."""
    processes: int
    number: int
    """Number of this process; 0 is the chief."""

    @classmethod
    def of_environment(cls) -> JobHost | None:
        """Returns the host that the environment variables describe; None for a single process.

        Raises:
          ConfigError: the variables are not valid.
        """
        address, processes, number = map(os.environ.get, _NAMES)
        if processes is None:
            return None
        chief = os.environ.get(CHIEF)
        before = 0 if chief is None else 1
        try:
            found = cls(chief or address or "", int(processes) + before, int(number or "") + before)
        except ValueError:
            found = cls("", 0, 0)
        if ":" not in found.address or not before <= found.number < found.processes:
            raise ConfigError(
                f"{_NAMES[1]}={processes} and {_NAMES[2]}={number} do not name a host of a job. "
                f"Set them and {_NAMES[0]} as Kubeflow Trainer's JAX runtime does."
            )
        return found if found.processes > 1 else None


class Message(IntEnum):
    """Message from the chief to the other hosts."""

    JOB = 0
    """Build the described round function."""
    BEGIN = 1
    """Start empty sums, with the given weights and clipping norm."""
    STEP = 2
    """Add these units."""
    END = 3
    """Exit."""


def connect(host: JobHost | None) -> bool:
    """Connects to the other hosts of the job, if any; must be called before JAX is used.

    Returns:
      Whether this process is the chief; True for a single process.

    Raises:
      StorageError: not all hosts connected in time.
    """
    if host is None:
        return True
    import jax

    # Otherwise JAX would abort this process before it reports that another host was lost.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(*host, initialization_timeout=_CONNECT_SECONDS)
    except RuntimeError as error:
        raise StorageError(
            f"Not all of the {host.processes} hosts of the job connected to {host.address} within "
            f"{_CONNECT_SECONDS // 60} minutes. Check why their pods do not start, then resume "
            "the run."
        ) from error
    _LOG.info(events.HOSTS, jax.process_count())
    return host.number == 0


def is_multi_host() -> bool:
    """Returns whether the job has several hosts."""
    import jax

    return jax.process_count() > 1


def send(message: Message, *parts: npt.ArrayLike) -> None:
    """Sends a message from the chief to all other hosts; does nothing on a single host."""
    if is_multi_host():
        body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        _coordinator().key_value_set(_next_key(), f"{message:d} {len(body)}")
        _broadcast(np.frombuffer(body, np.uint8))


def leave() -> None:
    """Ends the job: the chief sends the end and waits until all hosts received it."""
    import jax

    if jax.process_index() == 0:
        send(Message.END)
    try:
        _coordinator().wait_at_barrier("fedemb/end", _LEAVE_MILLISECONDS)
    except RuntimeError:  # a host is lost, but all rounds are committed
        _LOG.debug("not all hosts reached the final barrier")


def receive() -> tuple[Message, bytes]:
    """Waits for the chief's next message.

    A collective operation would time out after half a minute, while the chief may be busy. The
    announcement is therefore stored at the coordinator, and only the body uses a collective.

    Raises:
      StorageError: the chief or another host was lost.
    """
    with lost_host_errors():
        kind, size = (
            _coordinator().blocking_key_value_get(_next_key(), _RECEIVE_MILLISECONDS).split()
        )
    return Message(int(kind)), _broadcast(np.zeros(int(size), np.uint8)).tobytes()


class _Coordinator(Protocol):
    """Key-value store of the job's coordinator."""

    def key_value_set(self, key: str, value: str, /) -> None: ...
    def blocking_key_value_get(self, key: str, milliseconds: int, /) -> str: ...
    def wait_at_barrier(self, name: str, milliseconds: int, /) -> None: ...


def _coordinator() -> _Coordinator:
    from jax._src.distributed import global_state

    return cast("_Coordinator", global_state.client)


def _next_key() -> str:
    return f"fedemb/{next(_message_numbers)}"


def decoded_arrays(body: bytes, like: Iterable[npt.ArrayLike]) -> list[np.ndarray]:
    """Returns the arrays of a message, in the shapes and types of `like`."""
    found, start = [], 0
    for part in map(np.asarray, like):
        found.append(np.frombuffer(body, part.dtype, part.size, start).reshape(part.shape))
        start += part.nbytes
    return found


def _broadcast(data: np.ndarray) -> np.ndarray:
    """Returns the chief's array on every host."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    with lost_host_errors():
        return np.asarray(broadcast_one_to_all(data)) if data.size else data


@contextmanager
def lost_host_errors() -> Generator[None]:
    """Translates errors of JAX about a lost host.

    Raises:
      StorageError: a host was lost.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error) for word in _LOST_HOST_TERMS):
            raise
        raise StorageError(LOST) from error


# The other hosts of a training step: a TrainJob of Kubeflow Trainer (v2, JAX runtime).
#
# The step's pod is the chief. The compiled pipeline sets the number of other hosts and their
# TrainingRuntime in environment variables (`fedemb.pipelines.cluster.compile`). The chief starts
# the other hosts when it starts and deletes them when it ends, also after an error. If the chief is
# killed, its hosts end on their own, and the job is deleted with the chief's pod, which owns it.


HOSTS = "FEDEMB_HOSTS"
"""Environment variable: total number of hosts of the step, including the chief."""
RUNTIME = "FEDEMB_RUNTIME"
"""Environment variable: name of the TrainingRuntime."""
POD = {
    "FEDEMB_ADDRESS": "status.podIP",
    "FEDEMB_NAMESPACE": "metadata.namespace",
    "FEDEMB_POD": "metadata.name",
    "FEDEMB_POD_UID": "metadata.uid",
}
"""Environment variables of the step's pod, and the pod fields that they hold."""
PORT = 2222
"""Port of the chief. Other connections of JAX use ports that the system picks."""
HOST_LABEL = "fedemb.dev/host"
"""Pod label that the network policy selects."""
CONTAINER = "node"
"""Kubeflow Trainer's name of the training container and of its set of pods."""


def train_job() -> tuple[JobHost, str, JsonObject]:
    """Returns the chief of the step, its namespace, and the manifest of the other hosts' TrainJob.

    The environment variables of the step describe them.

    Raises:
      ConfigError: the variables were not set by a compiled pipeline.
    """
    runtime, address, namespace, pod, uid = (os.environ.get(name) for name in (RUNTIME, *POD))
    hosts = os.environ[HOSTS]
    others = int(hosts) - 1 if hosts.isdecimal() else 0
    if others < 1 or not (runtime and address and namespace and pod and uid):
        raise ConfigError(
            f"{HOSTS} is {hosts}, wanted 2 or more, with {RUNTIME} and "
            f"{', '.join(POD)}; compile the pipeline with `fedemb compile`"
        )
    chief = JobHost(f"{address}:{PORT}", others + 1, 0)
    owner: JsonObject = {"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid}
    manifest: JsonObject = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {
            "generateName": "fedemb-hosts-",
            "namespace": namespace,
            "ownerReferences": [owner],
        },
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            "trainer": {"numNodes": others, "env": [{"name": CHIEF, "value": chief.address}]},
        },
    }
    return chief, namespace, manifest


@contextmanager
def hosts_of_the_step() -> Generator[JobHost | None]:
    """Starts the other hosts while entered; yields the connection between them and the chief.

    Without other hosts in the variables, yields `JobHost.of_environment`.

    Raises:
      ConfigError: the variables are invalid, or the cluster lacks the runtime or the Trainer.
      StorageError: the cluster did not respond.
    """
    if HOSTS not in os.environ:
        yield JobHost.of_environment()
        return
    chief, namespace, manifest = train_job()
    from kubernetes import client, config
    from urllib3.exceptions import HTTPError

    config.load_incluster_config()
    api = client.CustomObjectsApi()
    kind = ("trainer.kubeflow.org", "v1alpha1", namespace, "trainjobs")
    try:
        answer = api.create_namespaced_custom_object(*kind, body=manifest)
        made = str(cast("dict[str, JsonObject]", answer)["metadata"].get("name"))
    except client.ApiException as error:
        why = f"the cluster refused the TrainJob of the other hosts ({error.status} {error.reason})"
        if error.status in (408, 429) or (error.status or 0) >= 500:
            raise StorageError(f"{why}; resume the run") from error
        raise ConfigError(
            f"{why}; install Kubeflow Trainer 2 with its JAX runtime and apply the file of hosts "
            "that `fedemb compile` wrote, or take `hosts` out of the profile"
        ) from error
    except (OSError, HTTPError) as error:
        raise StorageError(
            f"the cluster's API server does not answer ({type(error).__name__}); resume the run"
        ) from error
    try:
        yield chief
    finally:
        try:
            api.delete_namespaced_custom_object(*kind, name=made)
        except (client.ApiException, OSError, HTTPError) as error:
            # Training results stay valid, and this pod owns the job, so the job is deleted with it.
            _LOG.debug("the TrainJob stays until this pod goes (%s)", type(error).__name__)
