"""Training on several machines: the chief assigns virtual clients to the devices of all hosts.

Every host runs one process. The cluster is described in `TF_CONFIG`, as Kubeflow's TFJob writes it:

    {"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"]},
     "task": {"type": "chief", "index": 0}}

The chief is the ordinary train_dp_fedemb step. All others run

    python -m fedemb.embedding.cluster

and hold nothing but variables of the client at hand: coins, keys, noise, ledger and server state
live on the chief alone. What comes back are int64 sums, so one process and many give the same bits
(on processors of one kind). A round ends when all hosts have answered; if one is lost the round was
never committed, the chief exits with code 4, and a resume computes it again.

The traffic is gRPC without encryption or authentication, and un-noised: images go out, clipped sums
come back, and whoever reaches the port runs code. TensorFlow listens on all interfaces, whatever
address `TF_CONFIG` says. Let a network policy admit the hosts of this job and nobody else, or run
all processes on one machine behind a firewall.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from fedemb import events
from fedemb.embedding.threads import accelerators, available_cores, configure_threads
from fedemb.errors import ConfigError

_LOG = logging.getLogger(__name__)


def _described() -> dict[str, Any] | None:
    """`TF_CONFIG` of a job with several hosts, or None.

    Raises:
      ConfigError: it is not as above.
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        return None
    try:
        found = json.loads(text)
        hosts, task = found["cluster"], found["task"]
        known = 0 <= int(task["index"]) < len(hosts[task["type"]])
        several = "worker" in hosts
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"TF_CONFIG cannot be read ({type(error).__name__}); wanted cluster.chief, "
            "cluster.worker and task with type and index"
        ) from error
    if not known or (several and len(hosts.get("chief", ())) != 1):
        raise ConfigError(
            "TF_CONFIG needs one chief, and a task that is one of its hosts; see "
            "components/fedemb/embedding/cluster.py"
        )
    return found if several else None


def connect() -> list[str] | None:
    """Makes the devices of all hosts of the job known to this process, the chief.

    Returns:
      Names of one processor per host, this one first, or of all accelerators if there are any; None
      if the job is this process alone.

    Raises:
      ConfigError: `TF_CONFIG` is wrong, or this process is not the chief.
    """
    found = _described()
    if found is None:
        return None
    if found["task"]["type"] != "chief":
        raise ConfigError(
            f"this process is {found['task']['type']} {found['task']['index']} of TF_CONFIG, and "
            "only the chief trains; run python -m fedemb.embedding.cluster here"
        )
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(found["cluster"])
    tf.config.experimental_connect_to_cluster(cluster, job_name="chief", task_index=0)
    _LOG.info(events.HOSTS, 1 + len(found["cluster"]["worker"]))
    kinds = [tf.config.list_logical_devices(kind) for kind in ("GPU", "CPU")]
    return [device.name for device in (kinds[0] or kinds[1])]


def training_devices(parallel_clients: int) -> tuple[int, list[str] | None]:
    """Settles threads and devices of a training process; call it before TensorFlow is used.

    Args:
      parallel_clients: virtual clients side by side on each host, from the configuration; 0: one
        per core. Accelerators train one each.

    Returns:
      How many virtual clients train side by side, and the devices they are dealt to in turn (None:
      left to TensorFlow).
    """
    workers = configure_threads(parallel_clients)
    devices = connect()
    if devices is None:
        return workers, accelerators()
    return len(devices) if "GPU" in devices[0] else workers * len(devices), devices


def serve() -> None:
    """Lends this process's devices to the chief until it is stopped (SIGTERM).

    Raises:
      ConfigError: `TF_CONFIG` is missing or wrong, or this process is the chief.
    """
    found = _described()
    if found is None or found["task"]["type"] == "chief":
        raise ConfigError(
            "TF_CONFIG must say that this process is a worker; set task.type and task.index"
        )
    import tensorflow as tf

    threads = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=max(2, available_cores())
    )
    server = tf.distribute.Server(
        tf.train.ClusterSpec(found["cluster"]),
        job_name=found["task"]["type"],
        task_index=int(found["task"]["index"]),
        config=threads,
    )
    _LOG.info("serving the chief")
    server.join()


if __name__ == "__main__":
    serve()
