"""Times ledger commands, each in a new process, on a ledger of many records.

    python -m tests.benchmarks.bench_ledger --records 20000 --repeats 3

Prints processor time (user and system) of the whole process, imports included, and its share spent
on imports. Processor time, unlike elapsed time, does not depend on other load on the machine.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SHOW = """
from fedemb.pipelines.cli.main import main
main(["ledger", "show", "--ledger", {ledger!r}])
"""
VERIFY = SHOW.replace("show", "verify")
RESERVE = """
import pickle
from pathlib import Path
from fedemb.steps import reserve_budget
reserve_budget.run(pickle.loads(Path({context!r}).read_bytes()))
"""
IMPORTS = {
    "ledger show": "import fedemb.pipelines.cli.ledger_summary",
    "ledger verify": "import fedemb.pipelines.cli.ledger_summary",
    "reserve": "import fedemb.steps.reserve_budget",
}


def processor_time(script: str) -> float:
    """Returns user and system time of a Python process that runs a script, in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.decode()[-2000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def grown(folder: Path, records: int, repeats: int) -> tuple[str, list[Path]]:
    """Makes a ledger of so many records, with its markers.

    Returns:
      The address of the ledger and one pickled context per repeat.
    """
    from dataclasses import replace

    from fedemb.ledger.root import _marked
    from tests.kit import big_ledger
    from tests.kit.pipeline_runs import honest_run

    run = honest_run.start(folder / "first")
    run.do_plan()
    run.do_reserve()
    big_ledger.grow(run, records)
    marks = Path(run.keys_uri) / "ledger"
    for number, record in enumerate(_marked(run.ledger()), 1):
        mark = marks / f"{run.config.policy.policy_id}+{number}"
        if not mark.exists():
            mark.touch(0o600)
            mark.write_bytes(bytes.fromhex(record.sha))
    contexts: list[Path] = []
    for number in range(repeats):
        later = replace(run, run_id=f"later-{number}", root=folder / f"later-{number}")
        later.root.mkdir()
        later.do_plan()
        shutil.copytree(run.root / "pretrained", later.root / "pretrained")
        contexts.append(later.root / "context")
        contexts[-1].write_bytes(pickle.dumps(later.context()))
    return run.ledger_uri, contexts


def main() -> None:
    """Prints a line per command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ledger, contexts = grown(Path(folder), arguments.records, arguments.repeats)
        for name, imports in IMPORTS.items():
            whole: list[float] = []
            for repeat in range(arguments.repeats):
                scripts = {
                    "ledger show": SHOW.format(ledger=ledger),
                    "ledger verify": VERIFY.format(ledger=ledger),
                    "reserve": RESERVE.format(context=str(contexts[repeat])),
                }
                whole.append(processor_time(scripts[name]))
            loaded = min(processor_time(imports) for _ in range(arguments.repeats))
            sys.stdout.write(
                f"{name:14} {min(whole):.2f} s, median {statistics.median(whole):.2f} s, of which "
                f"imports {loaded:.2f} s\n"
            )


if __name__ == "__main__":
    main()
