"""Runs one act of an honest run and kills or stops itself at a named point.

    python killed_step.py ACT POINT ROOT SIGNAL

SIGKILL ends it as `kill -9` would; SIGSTOP makes it a lost pod, which SIGCONT resumes. Without a
point (`-`) the act runs through. The points are set from here by wrapping functions of the package;
the package has no hook for it.
"""

import os
import signal
import sys
from pathlib import Path

from fedemb.errors import FedEmbError
from fedemb.keys import LocalKeyStore
from fedemb.steps import account_privacy, release_model, reserve_budget
from fedemb.storage import local
from tests.kit.pipeline_runs import honest_run


def _record(number):
    return lambda self, name, data: name == f"weekly/{number:08d}.json"


def _root_key(self, name, key=None):
    return name.startswith("reservation/")


def _marker(self, name, data):
    return name == "glyphs/1.0.json"


def always(*args, **kwargs):
    return True


class Third:
    """The third call, in the midst of a tree."""

    calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.calls == 3


STORE, KEYS = local.LocalStore, LocalKeyStore
POINTS = {
    "reserve": {
        "before record": (STORE, "create", "before", _record(1)),
        "after record": (STORE, "create", "after", _record(1)),
        "before key": (KEYS, "create", "before", _root_key),
        "after key": (KEYS, "create", "after", _root_key),
        "before document": (reserve_budget, "write_bytes", "before", always),
        "after document": (reserve_budget, "write_bytes", "after", always),
    },
    "bind": {
        "before record": (STORE, "create", "before", _record(2)),
        "after record": (STORE, "create", "after", _record(2)),
    },
    "commit": {
        "before record": (STORE, "create", "before", _record(3)),
        "after record": (STORE, "create", "after", _record(3)),
        "before key is destroyed": (KEYS, "destroy", "before", always),
        "after key is destroyed": (KEYS, "destroy", "after", always),
    },
    "account": {
        "before report": (account_privacy, "build_report", "before", always),
        "before signature": (account_privacy, "write_signed", "before", always),
        "before lineage": (account_privacy, "write_run", "before", always),
        "before page": (account_privacy, "write_bytes", "before", always),
    },
    "release": {
        "before bundle": (release_model.parts, "place", "before", always),
        "before signature": (release_model.parts, "write_manifest", "before", always),
        "inside tree": (STORE, "_upload", "after", Third()),
        "before tree": (STORE, "create_tree", "before", always),
        "after tree": (STORE, "create_tree", "after", always),
        "before marker": (STORE, "create", "before", _marker),
        "after marker": (STORE, "create", "after", _marker),
        "before ledger": (STORE, "create", "before", _record(4)),
        "after ledger": (STORE, "create", "after", _record(4)),
        "before document": (
            release_model,
            "write_bytes",
            "before",
            lambda p, _: p.stem == "release",
        ),
    },
}


def arm(sent, owner, name, when, chosen):
    original, reached = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        hit = chosen(*args, **kwargs) and not reached
        if hit and when == "before":
            reached.append(name)
            os.kill(os.getpid(), sent)
        answer = original(*args, **kwargs)
        if hit and when == "after":
            reached.append(name)
            os.kill(os.getpid(), sent)
        return answer

    setattr(owner, name, wrapped)
    return reached


def main():
    act, point, root, sent = sys.argv[1:]
    run = honest_run.at(Path(root))
    reached = arm(signal.Signals[sent], *POINTS[act][point]) if point != "-" else [point]
    try:
        getattr(run, f"do_{act}")()
    except FedEmbError as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
        sys.exit(error.exit_code)
    sys.exit(0 if reached else 7)


if __name__ == "__main__":
    main()
