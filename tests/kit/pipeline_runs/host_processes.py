"""Processes of a training job of two hosts on JAX, forked from one that loads what takes long once.

`python -m tests.kit.pipeline_runs.host_processes FOLDER TASK SCENE...` prepares a run of a task,
plays scenes of `SCENES` with it and prints the exit code and the output of each process. Nothing
here can import TensorFlow.
"""

import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.kit.jax.without_tensorflow import forbid
from tests.kit.pipeline_runs.training_run import (
    ReadyRun,
    classifier_config,
    config,
    prepare,
    round_times,
)
from tests.kit.process import python
from tests.kit.servers.free_port import free_port

PATIENCE = 500.0
"""Seconds until the first round."""


class Host:
    """A running process."""

    def __init__(self, log, act, port=None, number=0):
        """Forks it; without a port it is alone."""
        self._log = log
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.setpgid(0, 0)
            descriptor = os.open(log, os.O_CREAT | os.O_WRONLY)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            if port is not None:
                os.environ["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
                os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = f"127.0.0.1:{port}"
                os.environ |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
            from fedemb.runtime.step import watched

            with watched("host", private=False):
                act()
            status = 0
        except SystemExit as left:
            status = left.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def runs(self):
        """Whether it has not ended yet."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def ended(self):
        """Waits; exit code, negative if killed, and what it said."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code, self._log.read_text()


def embedded(ready):
    """What the trained model makes of images, on the backend of this process."""
    import numpy as np

    from fedemb.models.backbone_files import load_backbone
    from fedemb.models.inference import embed

    backbone = load_backbone(ready.root / "model" / "backbone.keras", ready.config.model)
    size = ready.config.model.image_size
    images = np.random.default_rng(0).integers(0, 256, (4, size, size, 1), np.uint8)
    return embed(backbone, images, 4).tolist()


def _pair(ready):
    from fedemb.training.hosts import run_worker_host

    port = free_port()
    chief = Host(ready.root / "chief.log", ready.train, port)
    return chief, Host(ready.root / "other.log", run_worker_host, port, 1)


def alone(ready):
    """One process, which then embeds images."""

    def act():
        ready.train()
        (ready.root / "embedded.json").write_text(json.dumps(embedded(ready)))

    return {"chief": Host(ready.root / "alone.log", act).ended()}


def killed(ready):
    """One process after the other, each killed when it has a round on record, the last is not."""

    def act():
        import jax

        from fedemb.training.working_state import RoundLog

        jax.config.update("jax_enable_compilation_cache", False)  # a resumed run compiles again
        sound = RoundLog.commit

        def commit(*given):
            sound(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        RoundLog.commit = commit
        ready.train()

    ends = [Host(ready.root / f"killed-{number}.log", act).ended() for number in range(4)]
    return {"chief": ends[-1], "codes": [code for code, _ in ends]}


def together(ready):
    """Two processes."""
    chief, other = _pair(ready)
    return {"chief": chief.ended(), "other": other.ended()}


def lost(ready, victim=1, word=signal.SIGKILL):
    """Two processes, of which one is killed after the first round."""
    pair = _pair(ready)
    deadline = time.monotonic() + PATIENCE
    while not round_times(ready) and pair[0].runs() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(pair[victim].pid, word)  # with what it has started
    return {"chief": pair[0].ended(), "other": pair[1].ended()}


def chief_lost(ready):
    """The same, and it is the chief."""
    return lost(ready, victim=0)


def preempted(ready):
    """Two processes, of which the chief is asked to stop after the first round."""
    return lost(ready, victim=0, word=signal.SIGTERM)


SCENES = {scene.__name__: scene for scene in (alone, killed, together, lost, chief_lost, preempted)}


TASKS = {
    "embedding": (config, {"mechanism.rounds": 3}, 120),
    "classification": (classifier_config, {}, 40),
}
"""Configuration, what is changed in it, and users."""


def played(folder, task, *scenes):
    """What came of each scene, in a process of their own."""
    environment = {
        "KERAS_BACKEND": "jax",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),  # once for all processes
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    module = "tests.kit.pipeline_runs.host_processes"
    said = python("-m", module, folder, task, *scenes, env=environment, timeout=3600)
    return json.loads(said.splitlines()[-1])


def main(folder, task, *names):
    """Plays one scene after the other in copies of a run; `again:` continues in an old one."""
    forbid()
    make, changes, users = TASKS[task]
    settings, first = make(**changes, **{"training.backend": "jax"}), Path(folder, "ready")
    first.mkdir()
    from fedemb.training import hosts, working_state

    for module in ("jax", "keras", "fedemb.steps.train_model"):
        importlib.import_module(module)  # before the forks
    ready = Host(first / "log", lambda: prepare(first, settings, users=users)).ended()
    assert ready[0] == 0, ready[1]
    # Sources may be edited while a test runs; that a run refuses them then is another test's.
    reserved = json.loads((first / "reservation.json").read_text())["body"]["code_sha"]
    for module in (working_state, hosts):
        module.code_digest = lambda _config: reserved
    found = {}
    for name in names:
        root, scene = Path(folder, name), name
        if name.startswith("again:"):
            root, scene = Path(folder, name.removeprefix("again:")), "alone"
        else:
            shutil.copytree(first, root)  # the same keys: the same coins and noise
        ready = ReadyRun(root, settings)
        found[name] = SCENES[scene](ready) | {"rounds": len(round_times(ready))}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
