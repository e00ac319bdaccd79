#!/bin/bash
# Fetches the Beam engines that are no Python packages and partitions on each: `make test-flink`.
# What cannot be had is said in a sentence and skipped; an engine that is there must pass.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
cache=${FEDEMB_ENGINES:-$HOME/.cache/fedemb/engines}
version=$("$python" -c 'from importlib.metadata import version; print(version("apache-beam"))')
older=2.62.0 # the newest whose parts were all found where the job server of our Beam was not
mkdir -p "$cache"

job_server() { # artifact...: prints the path of the first that the registry has, of our Beam
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

parts() { # engine, Beam version, further properties: prints a class path of the job server's parts
    local name=$1-$2 log="$cache/$1-$2.log"
    if [ ! -d "$cache/$name" ]; then
        rm -rf "$cache/$name.part"
        mvn -B -q -f "tests/integration/beam_engines/$1.xml" -Dbeam="$2" "${@:3}" \
            dependency:copy-dependencies -DincludeScope=runtime \
            -DoutputDirectory="$cache/$name.part" >"$log" 2>&1 || return 1
        mv "$cache/$name.part" "$cache/$name"
    fi
    echo "$cache/$name/*"
}

if command -v mvn >/dev/null && command -v java >/dev/null; then
    missing="Maven Central, as reached from here, has neither the job server of Beam $version nor the parts of that of $older (logs in $cache)."
else
    missing="it needs Maven and Java 17, which are not installed here."
fi
if jars=$(job_server beam-runners-flink-{2.2,2.1,2.0,1.20,1.19}-job-server ||
    parts flink "$older" -Dflink=1.19); then
    export FEDEMB_FLINK_JOB_SERVER=$jars
    echo "Flink: $jars"
else
    echo "Flink is skipped: $missing"
fi
if jars=$(job_server beam-runners-spark-3-job-server || parts spark "$older"); then
    export FEDEMB_SPARK_JOB_SERVER=$jars
    echo "Spark: $jars"
else
    echo "Spark is skipped: $missing"
fi
if [ ! -x "$cache/prism-$version" ] && command -v go >/dev/null; then
    GOBIN="$cache" go install "github.com/apache/beam/sdks/v2/go/cmd/prism@v$version" >"$cache/prism.log" 2>&1 &&
        mv "$cache/prism" "$cache/prism-$version"
fi
if [ -x "$cache/prism-$version" ]; then
    export FEDEMB_PRISM="$cache/prism-$version"
    echo "Prism: $FEDEMB_PRISM"
else
    echo "Prism is skipped: it needs Go and Beam's module from its proxy, and one of them is not to be had here (log in $cache)."
fi
exec "$python" -m pytest -q -rs --durations=0 tests/integration/test_beam_engines.py "$@"
