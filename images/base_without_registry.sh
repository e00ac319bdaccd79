#!/usr/bin/env bash
# Makes a Debian bookworm base with Python 3.11 where no image registry can be reached, for podman.
# Needs root, podman, runc and debootstrap (apt-get install podman runc debootstrap conmon netavark).
#   images/base_without_registry.sh [localhost/fedemb-base:bookworm]
# The container settings that made podman run as root in a restricted virtual machine are written to
# $FEDEMB_PODMAN (default: a folder below the user's cache); use them with CONTAINERS_CONF.
set -euo pipefail

tag=${1:-localhost/fedemb-base:bookworm}
settings=${FEDEMB_PODMAN:-${XDG_CACHE_HOME:-$HOME/.cache}/fedemb-podman}
mkdir -p "$settings"
cat > "$settings/containers.conf" <<'CONF'
# crun may not raise limits here, and does not know hybrid cgroups: runc with explicit limits.
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
export CONTAINERS_CONF="$settings/containers.conf"
echo "settings: $CONTAINERS_CONF"
if podman image exists "$tag"; then
  echo "base: $tag (already there)"
  exit 0
fi
root=$(mktemp -d)
trap 'umount "$root/proc" 2>/dev/null || true; rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >/dev/null
umount "$root/proc" 2>/dev/null || true # debootstrap leaves it mounted
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/var/log/* "$root"/tmp/*
tar -C "$root" -c . | podman import --quiet - "$tag" >/dev/null
echo "base: $tag"
