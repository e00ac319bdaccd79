"""A Kubernetes control plane on loopback: etcd, API server, controllers, scheduler."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ADDRESS = "10.90.0.1"
PATIENCE = 600.0
"""Seconds a part may take to answer."""


@dataclass
class ControlPlane:
    """Starts on entering, ends on leaving; all of its files are in one folder."""

    binaries: Path
    folder: Path
    deployed: Path | None = None
    """The overlay that is applied."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.folder / "kubeconfig"

    def __enter__(self) -> ControlPlane:
        self._write_credentials()
        self._start(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
        )
        keys = self.folder / "accounts.key"
        self._start(
            "kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={ADDRESS}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder}/certificates",
            "--authorization-mode=RBAC",
            f"--token-auth-file={self.folder}/tokens.csv",
            "--service-account-issuer=https://cluster.test",
            f"--service-account-key-file={keys}",
            f"--service-account-signing-key-file={keys}",
            "--service-cluster-ip-range=10.91.0.0/24",
            "--kubelet-preferred-address-types=InternalIP",
        )
        self._wait()
        common = f"--kubeconfig={self.kubeconfig}"
        self._start(
            "kube-controller-manager",
            common,
            f"--service-account-private-key-file={keys}",
            "--leader-elect=false",
        )
        self._start("kube-scheduler", common, "--leader-elect=false")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:  # nothing of it is kept, so nothing need end well
            process.kill()
            process.wait()

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Runs kubectl as the administrator and returns its output."""
        done = self.attempt(*arguments, given=given)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def attempt(
        self, *arguments: str, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The same, whatever comes of it."""
        return subprocess.run(
            [self.binaries / "kubectl", *arguments],
            input=given,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            check=False,
        )

    def apply(self, *documents: dict[str, Any]) -> None:
        """Applies objects as the administrator."""
        text = "\n---\n".join(json.dumps(document) for document in documents)
        self.kubectl("apply", "--server-side", "-f", "-", given=text)

    def _start(self, name: str, *flags: str) -> None:
        log = (self.folder / f"{name}.log").open("wb")
        self.processes.append(
            subprocess.Popen([self.binaries / name, *flags], stdout=log, stderr=log)
        )

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE
        while self.attempt("get", "--raw", "/readyz").returncode != 0:
            ended = [process for process in self.processes if process.poll() is not None]
            logs = "".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
            assert not ended, f"a part of the control plane ended: {logs}"
            assert time.monotonic() < until, f"the control plane is not ready: {logs}"
            time.sleep(0.5)

    def _write_credentials(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        token = secrets.token_hex(16)
        (self.folder / "tokens.csv").write_text(f'{token},admin,admin,"system:masters"\n')
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": "https://127.0.0.1:6443",
                        "insecure-skip-tls-verify": True,
                    },
                }
            ],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))
