"""Runs every step in a container under kfp.local, with docker or podman's socket (DOCKER_HOST).

kfp 2.17.0's own runner starts containers with `auto_remove` and asks for the exit code afterwards;
a container that is gone by then counts as a success, so a failing step can pass. It also lets an
image's ENTRYPOINT swallow the command. Here a container is created, started, followed, waited for
and then removed, and its exit code is the step's.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedemb.errors import InputError, StorageError


def container_runner(
    *,
    images: Mapping[str, str],
    mounts: Sequence[Path] = (),
    read_only_mounts: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Returns a `kfp.local.DockerRunner` whose containers report true exit codes.

    The containers run as the calling user, without capabilities, on a read-only root, with the
    process ids of this machine, so that a step's own pid can be asked to stop.

    Args:
      images: the symbolic images of `fedemb.runtime.step` and their replacements.
      mounts: folders a step writes beside the pipeline root: stores, keys, ledger.
      read_only_mounts: folders a step reads: private and public images.
      environment: variables of every step, e.g. the endpoint of an object store.

    Raises:
      InputError: the client library is not installed.
      StorageError: no docker daemon or podman socket answers.
    """
    try:
        import docker
        from docker import errors
    except ImportError as error:
        raise InputError(
            "running steps in containers needs the Python package `docker`; install "
            "requirements/dev.txt"
        ) from error
    from kfp import local
    from kfp.local import docker_task_handler

    try:
        docker.from_env().ping()
    except errors.DockerException as error:
        raise StorageError(
            "no container engine answers; start docker, or `podman system service` and set "
            "DOCKER_HOST to its socket"
        ) from error
    volumes = {str(path): {"bind": str(path), "mode": "rw"} for path in mounts}
    volumes |= {str(path): {"bind": str(path), "mode": "ro"} for path in read_only_mounts}
    docker_task_handler.run_docker_container = partial(
        run_step, images=dict(images), more_volumes=volumes, variables=dict(environment or {})
    )
    return local.DockerRunner()


def run_step(
    client: Any,
    image: str,
    command: list[str],
    volumes: dict[str, dict[str, str]],
    *,
    images: Mapping[str, str],
    more_volumes: Mapping[str, dict[str, str]],
    variables: Mapping[str, str],
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> int:
    """Runs one command in a container and returns its exit code.

    Raises:
      InputError: the image is not there; nothing is pulled in the middle of a run.
    """
    from docker import errors

    name = images.get(image, image)
    try:
        container = client.containers.create(
            name,
            entrypoint=command[:1],
            command=command[1:],
            volumes={**volumes, **more_volumes},
            environment={**variables, **(environment or {})},
            user=f"{os.getuid()}:{os.getgid()}",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pid_mode="host",
            network_mode="host",
            read_only=True,
            tmpfs={"/tmp": "rw,exec,mode=1777"},
            **options,
        )
    except errors.ImageNotFound as error:
        raise InputError(f"the image {name} is not here; build it with `make images`") from error
    try:
        container.start()
        with _stopping(container):
            for line in container.logs(stream=True, follow=True):
                sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
            return int(container.wait()["StatusCode"])
    finally:
        with suppress(errors.NotFound):
            container.remove(force=True)


@contextmanager
def _stopping(container: Any) -> Iterator[None]:
    """Passes SIGTERM on to the container, so that the trainer finishes its round."""

    def handle(*_: object) -> None:
        container.kill(signal="SIGTERM")

    try:
        previous = signal.signal(signal.SIGTERM, handle)
    except ValueError:  # not the main thread: kfp runs independent tasks in a pool
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
