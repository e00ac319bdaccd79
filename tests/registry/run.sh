#!/bin/bash
# Builds Kubeflow's Model Registry 0.3.0 from the Go module proxy, once, starts it on loopback with
# MariaDB behind it (on PostgreSQL that version cannot look a model version up by its name), and
# runs the tests of registries against it.
set -euo pipefail
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
for program in go mariadbd; do
  if ! command -v "$program" >/dev/null; then
    echo "skipped: $program is not installed (Go 1.24 or newer; Debian's mariadb-server-core)"
    exit 0
  fi
done
digest=$(cat server/go.mod server/go.sum | sha256sum | cut -c1-16)
binary=${XDG_CACHE_HOME:-$HOME/.cache}/fedemb-model-registry/$digest
if [ ! -x "$binary" ]; then
  mkdir -p "$(dirname "$binary")"
  (cd server && GOFLAGS="-mod=readonly ${GOFLAGS:-}" nice -n 10 go build -o "$binary.new" .)
  mv "$binary.new" "$binary"
fi

scratch=$(mktemp -d)
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait; rm -rf "$scratch"' EXIT
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
database=$(free_port) port=$(free_port)
mkdir -p "$scratch/data/mysql"
options=(--no-defaults --user="$(id -un)" --datadir="$scratch/data" --skip-grant-tables)
echo "CREATE DATABASE registry;" | mariadbd "${options[@]}" --bootstrap 2>"$scratch/bootstrap.log"
mariadbd "${options[@]}" --skip-networking=0 --bind-address=127.0.0.1 --port="$database" \
  --socket="$scratch/socket" >"$scratch/mariadb.log" 2>&1 &
started+=($!)
for _ in $(seq 120); do grep -q "ready for connections" "$scratch/mariadb.log" && break; sleep 0.5; done
"$binary" proxy --hostname 127.0.0.1 --port "$port" --datastore-type embedmd \
  --embedmd-database-type mysql --embedmd-database-dsn \
  "root@tcp(127.0.0.1:$database)/registry?charset=utf8mb4&parseTime=true" >"$scratch/server.log" 2>&1 &
started+=($!)
for _ in $(seq 240); do
  curl -sf "http://127.0.0.1:$port/api/model_registry/v1alpha3/registered_models" >/dev/null && break
  sleep 0.5
done
cd "$root"
FEDEMB_MODEL_REGISTRY=http://127.0.0.1:$port .venv/bin/python -m pytest -q -rs \
  "${@:-tests/components/release/test_release_registries.py}"
