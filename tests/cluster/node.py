"""A node of the control plane: kubelet, containerd and runc, pods with addresses of their own."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane import ADDRESS, PATIENCE, ControlPlane

POD_PATIENCE = 900.0
"""Seconds a pod may take to its end: one that trains loads TensorFlow first."""
PAUSE = "registry.k8s.io/pause:3.10.1"


@dataclass
class Node:
    """Starts on entering, ends on leaving; images come from archives, never from a registry."""

    plane: ControlPlane
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> Node:
        self.folder.mkdir(parents=True)
        self._write_settings()
        self._start("containerd", "--config", self.folder / "containerd.toml")
        self._wait("containerd", self._ctr, "version")
        self.load(_image_of_one_file(self.plane.binaries / "pause", PAUSE, self.folder))
        self._start(
            "kubelet",
            *("--config", self.folder / "kubelet.json", "--kubeconfig", self.plane.kubeconfig),
            *("--root-dir", self.folder / "kubelet", "--hostname-override", "node"),
            *("--node-ip", ADDRESS),
        )
        ready = "--for=condition=Ready"
        self._wait("kubelet", self.plane.attempt, "wait", ready, "node/node", "--timeout=1s")
        return self

    def __exit__(self, *_: object) -> None:
        away = ("delete", "pods", "--all", "-n", "fedemb", "--wait=true", "--timeout=60s")
        self.plane.attempt(*away)
        for process in reversed(self.processes):
            process.terminate()
            process.wait()

    def load(self, archive: Path) -> None:
        """Gives the node an image, from a docker archive."""
        done = self._ctr("--namespace", "k8s.io", "images", "import", "--local", archive)
        assert done.returncode == 0, done.stderr

    def run(self, pod: dict[str, Any], user: str) -> Ended:
        """Runs a pod in the namespace of the runs to its end, made by somebody."""
        create = ("create", "-n", "fedemb", "-f", "-", "-o", "name", f"--as={user}")
        made = self.plane.kubectl(*create, given=json.dumps(pod))
        name = made.strip()
        until = time.monotonic() + POD_PATIENCE
        while True:
            text = self.plane.kubectl("get", "-n", "fedemb", name, "-o", "json")
            status = json.loads(text)["status"]
            if status["phase"] in ("Succeeded", "Failed"):
                break
            assert time.monotonic() < until, self.plane.kubectl("describe", "-n", "fedemb", name)
            time.sleep(0.5)
        log = self.plane.kubectl("logs", "-n", "fedemb", name, "-c", "main")
        (main,) = status["containerStatuses"]
        return Ended(main["state"]["terminated"]["exitCode"], log)

    def _write_settings(self) -> None:
        runc = shutil.which("runc")
        runtime = 'plugins."io.containerd.cri.v1.runtime"'
        (self.folder / "containerd.toml").write_text(f"""\
version = 3
root = "{self.folder}/images"
state = "{self.folder}/state"
[grpc]
  address = "{self.folder}/containerd.sock"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE}"
[{runtime}]
  restrict_oom_score_adj = true
  disable_apparmor = true
[{runtime}.cni]
  bin_dirs = ["{self.plane.binaries}"]
  conf_dir = "{self.folder}/network"
[{runtime}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [{runtime}.containerd.runtimes.runc.options]
    BinaryName = "{runc}"
""")
        (self.folder / "network").mkdir()
        addresses = {"type": "host-local", "ranges": [[{"subnet": "10.92.0.0/24"}]]}
        plugin = {"type": "ptp", "ipam": {**addresses, "dataDir": f"{self.folder}/addresses"}}
        network = {"cniVersion": "1.0.0", "name": "pods", "plugins": [plugin]}
        (self.folder / "network" / "pods.conflist").write_text(json.dumps(network))
        (self.folder / "resolv.conf").touch()
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{self.folder}/containerd.sock",
            "resolvConf": f"{self.folder}/resolv.conf",
            # What a machine may lack that is itself a guest: cgroups of version 2, groups of its
            # own making, the right to protect a process from the end of memory.
            "failCgroupV1": False,
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "oomScoreAdj": 0,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%"},
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
        }
        (self.folder / "kubelet.json").write_text(json.dumps(settings))

    def _ctr(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.plane.binaries / "ctr", "-a", self.folder / "containerd.sock", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    def _start(self, name: str, *flags: str | Path) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        command = [self.plane.binaries / name, *flags]
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=_with_runc()))

    def _wait(self, name: str, ask: Any, *arguments: str) -> None:
        until = time.monotonic() + PATIENCE
        while ask(*arguments).returncode != 0:
            log = (self.folder / f"{name}.log").read_text()[-3000:]
            assert self.processes[-1].poll() is None, f"{name} ended: {log}"
            assert time.monotonic() < until, f"{name} is not ready: {log}"
            time.sleep(0.5)


@dataclass(frozen=True)
class Ended:
    """How a pod ended."""

    exit_code: int
    log: str


def _with_runc() -> dict[str, str]:
    binaries = os.environ["FEDEMB_CONTROL_PLANE"]
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}


def _image_of_one_file(program: Path, name: str, folder: Path) -> Path:
    """A docker archive with one program in it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(program, arcname=program.name)
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": [f"/{program.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    files = {
        "config.json": json.dumps(config).encode(),
        "layer.tar": layer.getvalue(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    archive = folder / f"{program.name}.tar"
    with tarfile.open(archive, "w") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return archive
