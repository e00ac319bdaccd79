#!/usr/bin/env bash
# `make test-containers`: one command from a fresh clone. Installs podman where it is root and apt
# has it, makes a base where no registry can be reached, builds light and cpu (layers whose inputs
# did not change are found again) and runs the container tests.
# With docker and a registry: BASE=python:3.11-slim-bookworm@sha256:... ENGINE=docker
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${FEDEMB_PYTHON:-.venv/bin/python}
if [ -z "${BASE:-}" ]; then
  if ! command -v podman >/dev/null || ! command -v debootstrap >/dev/null; then
    packages="podman buildah runc debootstrap conmon netavark"
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
      echo "podman and debootstrap are needed: install $packages, or set BASE and ENGINE" >&2
      exit 2
    fi
    echo "installing $packages"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
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
"$python" -m pytest tests/integration/test_image_definitions.py -v "$@"
echo
echo "load $(cut -d' ' -f1-3 /proc/loadavg), $(nproc) cores, $("${ENGINE:-docker}" --version)"
