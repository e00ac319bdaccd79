"""Configures threads and devices once per process, before TensorFlow starts."""

# TensorFlow, Keras, JAX and SciPy are not fully typed; the project's own signatures are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import logging
import os

_LOG = logging.getLogger(__name__)


def available_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def configure_threads(parallel_clients: int = 0) -> int:
    """Configures one thread per virtual client; returns the number of parallel clients.

    The intra-op threads of the process cannot be changed after TensorFlow has started. Parallel
    clients with one thread each are faster than one client with many threads, and the bits of a
    client then do not depend on the number of parallel clients.

    Args:
      parallel_clients: number from the configuration; 0: one per core, or per accelerator.
    """
    import tensorflow as tf

    workers = parallel_clients or len(tf.config.list_physical_devices("GPU")) or available_cores()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, workers))
    except RuntimeError:
        if tf.config.threading.get_intra_op_parallelism_threads() != 1:
            _LOG.info("TensorFlow has already started; its thread settings are unchanged")
    return workers


def accelerators() -> list[str] | None:
    """Returns the names of accelerators for clients; None on a machine without accelerators."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_logical_devices("GPU")] or None
