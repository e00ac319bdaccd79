#!/bin/bash
# Builds a Kubernetes control plane and a node from the Go module proxy, once, and runs the tests of
# tests/cluster against them in namespaces of their own: loopback and nothing else.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)

if ! command -v go >/dev/null; then
  echo "skipped: the control plane is built from source, and Go is not installed (1.24 or newer)"
  exit 0
fi
digest=$(cat {control_plane,node,stores}/go.{mod,sum} node/pause/main.go | sha256sum | cut -c1-16)
binaries=${FEDEMB_CONTROL_PLANE:-${XDG_CACHE_HOME:-$HOME/.cache}/fedemb-control-plane/$digest}
mkdir -p "$binaries"
export CGO_ENABLED=0 GOTOOLCHAIN=${GOTOOLCHAIN:-auto} GOFLAGS="-mod=readonly -trimpath ${GOFLAGS:-}"
build() { # MODULE PACKAGE...
  local module=$1 package name started
  shift
  for package; do
    name=$(basename "${package%/server/v3}")
    [ -x "$binaries/$name" ] && continue
    started=$SECONDS
    (cd "$module" && nice -n 10 go build -ldflags "-s -w" -o "$binaries/$name.new" "$package")
    mv "$binaries/$name.new" "$binaries/$name"
    echo "built $name in $((SECONDS - started)) s"
  done
}
build control_plane go.etcd.io/etcd/server/v3 \
  k8s.io/kubernetes/cmd/{kube-apiserver,kubectl,kube-scheduler,kube-controller-manager,kubelet}
build node github.com/containerd/containerd/v2/cmd/{containerd,containerd-shim-runc-v2,ctr} \
  github.com/containernetworking/plugins/plugins/{main/loopback,main/ptp,ipam/host-local} ./pause
build stores github.com/minio/{minio,mc}

export FEDEMB_CONTROL_PLANE=$binaries PATH=$binaries:$PATH
# Whatever is started ends with its namespace of processes, also if this is killed.
apart=(unshare --net --mount --pid --fork --mount-proc --kill-child)
if [ "$(id -u)" -ne 0 ]; then apart=("${apart[@]}" --map-root-user); fi
# The API server asks for an address that is not loopback; this one leads nowhere.
# shellcheck disable=SC2016
exec "${apart[@]}" bash -c 'ip link set lo up && ip address add 10.90.0.1/32 dev lo
  cd "$1" && shift && .venv/bin/python -m pytest -q -rs "${@:-tests/cluster}"' _ "$root" "$@"
