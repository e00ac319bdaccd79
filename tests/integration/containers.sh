#!/usr/bin/env bash
# `make test-containers`: makes a base where no registry can be reached, builds light and cpu, runs
# the container tests. With docker and a registry, BASE=python:3.11-slim-bookworm skips the first.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -z "${BASE:-}" ]; then
  if ! command -v podman >/dev/null || ! command -v debootstrap >/dev/null; then
    echo "no podman or debootstrap: apt-get install podman runc debootstrap conmon netavark, or set BASE" >&2
    exit 2
  fi
  images/base_without_registry.sh localhost/fedemb-base:bookworm
  export CONTAINERS_CONF="${FEDEMB_PODMAN:-${XDG_CACHE_HOME:-$HOME/.cache}/fedemb-podman}/containers.conf"
  export ENGINE=podman BASE=localhost/fedemb-base:bookworm
fi
# Package downloads through this machine's own certificates, where it has some.
if [ -z "${BUILD_FLAGS:-}" ] && [ -f /etc/pip.conf ]; then
  BUILD_FLAGS="--network host -v /etc/ssl/certs:/etc/ssl/certs:ro -v /etc/pip.conf:/etc/pip.conf:ro"
  BUILD_FLAGS+=" --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt"
  export BUILD_FLAGS
fi
nice images/build.sh light cpu
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
export FEDEMB_LIGHT_IMAGE=localhost/fedemb-light:$version FEDEMB_CPU_IMAGE=localhost/fedemb-cpu:$version
.venv/bin/python -m pytest tests/integration/test_containers.py -v "$@"
