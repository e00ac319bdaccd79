"""Multi-host training on JAX: host discovery, and messages from the chief to the other hosts.

Every host runs one process. Process 0, the chief, is the ordinary training step. All others run

    python -m fedemb.training.hosts

and hold only the units of the current step: coins, keys, noise, ledger and server state are only on
the chief. The chief tells all hosts what to compute, and all hosts sum their integers. So one
process and many processes give the same bits (on processors of one kind).

The variables of Kubeflow Trainer's JAX runtime say who a process is, the chief as process 0:

    JAX_COORDINATOR_ADDRESS=host0:2222  JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0

With `FEDEMB_CHIEF=address:port` besides, they count the other hosts alone, which a pipeline's step
started (`training.train_job`).

The traffic is not encrypted, not authenticated, and un-noised: images are sent out, and clipped
sums come back. Use a network policy that admits only the hosts of this job.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from fedemb.errors import ConfigError, StorageError
from fedemb.foundation import step_logging as events

_LOG = logging.getLogger(__name__)
CHIEF = "FEDEMB_CHIEF"
"""Environment variable: address and port of a chief that is not among those that are counted."""
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
"""Words of what JAX says when a host is gone."""
LOST = (
    "a host of the training job was lost in a round, which was not committed; start the hosts "
    "again and resume the run"
)
_CONNECT_SECONDS = 1800
"""Seconds until all hosts must have come: a node may have to be made first."""
_RECEIVE_MILLISECONDS = 24 * 3600 * 1000
"""Milliseconds that the others wait for the chief to say something."""
_LEAVE_MILLISECONDS = 10_000
"""Milliseconds that hosts wait for each other at the end."""
_message_numbers = count(0)
"""Of the messages of this process: the chief and the others count alike."""


class JobHost(NamedTuple):
    """Where a process stands among the hosts of its job."""

    address: str
    """Of the chief, with its port."""
    processes: int
    number: int
    """0: the chief."""

    @classmethod
    def of_environment(cls) -> JobHost | None:
        """What the variables say; None for a process that is alone.

        Raises:
          ConfigError: they name no host of a job.
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
                f"{_NAMES[1]}={processes} and {_NAMES[2]}={number} name no host of a job; set them "
                f"and {_NAMES[0]}, as Kubeflow Trainer's JAX runtime does"
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
    """Joins the hosts of this job, if there are several; call it before JAX is used.

    Returns:
      Whether this process is the chief; one that is alone is.

    Raises:
      StorageError: not all hosts came.
    """
    if host is None:
        return True
    import jax

    # Else JAX would end this process before our error is shown when another one is lost.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(*host, initialization_timeout=_CONNECT_SECONDS)
    except RuntimeError as error:
        raise StorageError(
            f"not all of the {host.processes} hosts of the job came to {host.address} within "
            f"{_CONNECT_SECONDS // 60} minutes; see why their pods do not start, and resume the run"
        ) from error
    _LOG.info(events.HOSTS, jax.process_count())
    return host.number == 0


def is_multi_host() -> bool:
    """Whether other hosts wait for messages of this one."""
    import jax

    return jax.process_count() > 1


def send(message: Message, *parts: Any) -> None:
    """Tells all other hosts, from the chief; does nothing if there are no others."""
    if is_multi_host():
        body = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        _coordinator().key_value_set(_next_key(), f"{message:d} {len(body)}")
        _broadcast(np.frombuffer(body, np.uint8))


def leave() -> None:
    """The end of the job: the chief says so and lets the others hear it before it goes."""
    import jax

    if jax.process_index() == 0:
        send(Message.END)
    try:
        _coordinator().wait_at_barrier("fedemb/end", _LEAVE_MILLISECONDS)
    except RuntimeError:  # somebody is gone; all rounds are on record
        _LOG.debug("not all hosts were there at the end")


def receive() -> tuple[Message, bytes]:
    """Waits for the chief's next message.

    A collective would give up after half a minute, in which the chief may have other work: that
    there is a message is left with the coordinator, and only its body is exchanged by all at once.

    Raises:
      StorageError: the chief or another host was lost.
    """
    with lost_host_errors():
        kind, size = (
            _coordinator().blocking_key_value_get(_next_key(), _RECEIVE_MILLISECONDS).split()
        )
    return Message(int(kind)), _broadcast(np.zeros(int(size), np.uint8)).tobytes()


def _coordinator() -> Any:
    """Where the coordinator keeps short notes for all hosts."""
    from jax._src.distributed import global_state

    return global_state.client


def _next_key() -> str:
    return f"fedemb/{next(_message_numbers)}"


def decoded_arrays(body: bytes, like: Sequence[Any]) -> list[np.ndarray]:
    """The arrays of a message, in shapes and types that both sides know."""
    found, start = [], 0
    for part in map(np.asarray, like):
        found.append(np.frombuffer(body, part.dtype, part.size, start).reshape(part.shape))
        start += part.nbytes
    return found


def _broadcast(data: np.ndarray) -> np.ndarray:
    """The chief's numbers, on every host."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    with lost_host_errors():
        return np.asarray(broadcast_one_to_all(data)) if data.size else data


@contextmanager
def lost_host_errors() -> Iterator[None]:
    """Says in one sentence that a host was lost.

    Raises:
      StorageError: one was.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if not any(word in str(error) for word in _LOST_HOST_TERMS):
            raise
        raise StorageError(LOST) from error
