#!/usr/bin/env bash
# Builds images with docker or podman: images/build.sh light cpu
# BASE, REGISTRY, ENGINE, REVISION and VERSION may be set; BUILD_FLAGS goes to the engine as it is.
# FIGURES names a file that gets a line `name, size, seconds` per image.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -eq 0 ]; then
  echo "name one or more of: cpu gpu tpu light" >&2
  exit 2
fi
engine=${ENGINE:-}
if [ -z "$engine" ]; then
  if docker info >/dev/null 2>&1; then engine=docker; elif command -v podman >/dev/null; then engine=podman; else
    echo "neither a docker daemon nor podman was found: install one, or set ENGINE" >&2
    exit 2
  fi
fi
revision=${REVISION:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
version=${VERSION:-$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)}
flags=()
if [ "$engine" = podman ]; then
  # The dates of all files in the layers, so that the same source gives the same digest.
  flags+=(--format oci --timestamp "${SOURCE_DATE_EPOCH:-0}" --ignorefile images/Dockerfile.dockerignore)
fi
for flavour in "$@"; do
  if [ ! -f "requirements/$flavour.txt" ]; then
    echo "no flavour $flavour: there are cpu gpu tpu light" >&2
    exit 2
  fi
  image=${REGISTRY:-localhost}/fedemb-$flavour:$version
  before=$("$engine" image inspect --format '{{.Id}}' "$image" 2>/dev/null || true)
  started=$SECONDS
  # shellcheck disable=SC2086  # BUILD_FLAGS is a list of words
  "$engine" build --file images/Dockerfile --target runtime \
    --build-arg "BASE=${BASE:-python:3.11-slim-bookworm}" --build-arg "FLAVOUR=$flavour" \
    --build-arg "REVISION=$revision" --build-arg "VERSION=$version" \
    --tag "$image" "${flags[@]}" ${BUILD_FLAGS:-} .
  took="built in $((SECONDS - started)) s"
  if [ "$("$engine" image inspect --format '{{.Id}}' "$image")" = "$before" ]; then
    took="unchanged, found in $((SECONDS - started)) s"
  fi
  size=$(($("$engine" image inspect --format '{{.Size}}' "$image") / 1000000))
  echo "fedemb-$flavour:$version $size MB, $took"
  if [ -n "${FIGURES:-}" ]; then echo "image $flavour|$size MB|$took" >>"$FIGURES"; fi
done
