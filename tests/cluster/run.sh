#!/bin/bash
# Builds a Kubernetes control plane from the Go module proxy, once, and runs the tests of
# tests/cluster against it in a network namespace of its own: loopback and nothing else.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)

if ! command -v go >/dev/null; then
  echo "skipped: the control plane is built from source, and Go is not installed (1.24 or newer)"
  exit 0
fi
digest=$(cat control_plane/go.mod control_plane/go.sum | sha256sum | cut -c1-16)
binaries=${FEDEMB_CONTROL_PLANE:-${XDG_CACHE_HOME:-$HOME/.cache}/fedemb-control-plane/$digest}
mkdir -p "$binaries"
export CGO_ENABLED=0 GOTOOLCHAIN=${GOTOOLCHAIN:-auto} GOFLAGS="-mod=readonly -trimpath ${GOFLAGS:-}"
for package in k8s.io/kubernetes/cmd/{kube-apiserver,kubectl,kube-scheduler,kube-controller-manager} \
  go.etcd.io/etcd/server/v3; do
  name=$(basename "${package%/server/v3}")
  if [ ! -x "$binaries/$name" ]; then
    started=$SECONDS
    (cd control_plane && nice -n 10 go build -ldflags "-s -w" -o "$binaries/$name.new" "$package")
    mv "$binaries/$name.new" "$binaries/$name"
    echo "built $name in $((SECONDS - started)) s"
  fi
done

export FEDEMB_CONTROL_PLANE=$binaries PATH=$binaries:$PATH
own_network=(unshare --net)
if [ "$(id -u)" -ne 0 ]; then own_network=(unshare --map-root-user --net); fi
# The API server asks for an address that is not loopback; this one leads nowhere.
# shellcheck disable=SC2016
exec "${own_network[@]}" bash -c 'ip link set lo up && ip address add 10.90.0.1/32 dev lo
  cd "$1" && shift && exec .venv/bin/python -m pytest -q -rs tests/cluster "$@"' _ "$root" "$@"
