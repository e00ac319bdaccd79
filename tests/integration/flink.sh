#!/bin/bash
# Fetches the Beam engines that are no Python packages and partitions on each: `make test-flink`.
# What cannot be had is said in a sentence and skipped; an engine that is there must pass.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
cache=${FEDEMB_ENGINES:-$HOME/.cache/fedemb/engines}
version=$("$python" -c 'from importlib.metadata import version; print(version("apache-beam"))')
mkdir -p "$cache"

job_server() { # artifact...: prints the path of the first that the registry has
    command -v mvn >/dev/null && command -v java >/dev/null || return 1
    for artifact in "$@"; do
        if [ ! -f "$cache/$artifact-$version.jar" ]; then
            mvn -B -q dependency:get -Dtransitive=false \
                -Dartifact="org.apache.beam:$artifact:$version" >"$cache/$artifact.log" 2>&1 || continue
            mvn -B -q dependency:copy -Dartifact="org.apache.beam:$artifact:$version" \
                -DoutputDirectory="$cache" >>"$cache/$artifact.log" 2>&1 || continue
        fi
        echo "$cache/$artifact-$version.jar"
        return 0
    done
    return 1
}

if jar=$(job_server beam-runners-flink-{2.2,2.1,2.0,1.20,1.19}-job-server); then
    export FEDEMB_FLINK_JOB_SERVER=$jar
else
    echo "Flink is skipped: Maven Central, as reached from here, has no job server of Beam $version for it."
fi
if jar=$(job_server beam-runners-spark-3-job-server); then
    export FEDEMB_SPARK_JOB_SERVER=$jar
else
    echo "Spark is skipped: Maven Central, as reached from here, has no job server of Beam $version for it."
fi
if [ ! -x "$cache/prism-$version" ] && command -v go >/dev/null; then
    GOBIN="$cache" go install "github.com/apache/beam/sdks/v2/go/cmd/prism@v$version" >"$cache/prism.log" 2>&1 &&
        mv "$cache/prism" "$cache/prism-$version"
fi
if [ -x "$cache/prism-$version" ]; then
    export FEDEMB_PRISM="$cache/prism-$version"
else
    echo "Prism is skipped: it cannot be built here (go install, see $cache/prism.log)."
fi
exec "$python" -m pytest -q -rs tests/integration/test_beam_engines.py "$@"
