"""Kills runs at random moments, night after night, and counts what was lost or charged twice.

    python tests/adversary/random_kills.py RECORD [--kills 100] [--minutes 60] [--training 20]

A life is one run, from its plan to its release and on to a user who is deleted. Every step of it
runs in a process that is killed after a random time, up to five times, and started again. At its
end the ledger must charge what it charges without a kill, and every file have the same bytes. With
`--training` the real trainer is killed so often as well: its weights must be bit-identical.

Each call adds a line to RECORD and prints what all lines say together; exit code 1 if anything was
ever lost.
"""

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import kills
import numpy as np

CHAIN = kills.STEPS
STAND_INS = {"pretrain", "partition", "measure"}
"""Steps without TensorFlow here: they are done and not killed."""
KILLS_OF_A_STEP = 5


def begin(root: Path) -> Path:
    """A run of which nothing was done."""
    kills.start(root)
    return root


def unbroken(root: Path) -> dict[str, float]:
    """Does all steps without a kill; returns the seconds each took."""
    seconds = {}
    for step, do in CHAIN.items():
        started = time.monotonic()
        outcome = kills.in_child(root, do)
        assert outcome.status == 0, outcome.text
        seconds[step] = time.monotonic() - started
    return seconds


def live(root: Path, seconds: dict[str, float], random: np.random.Generator) -> Counter[str]:
    """One life: how often it was killed, and what was wrong right after a kill."""
    found: Counter[str] = Counter()
    for step, do in CHAIN.items():
        for _ in range(0 if step in STAND_INS else KILLS_OF_A_STEP):
            outcome = kills.in_child(root, do, kill_after=random.uniform(0, 1.1 * seconds[step]))
            if not outcome.killed:
                break
            found["kills"] += 1
            try:
                kills.charge(root)
            except kills.FedEmbError as error:
                _tell(found, "broken", f"after a kill of {step}: {error}")
        outcome = kills.in_child(root, do)
        if outcome.status:
            _tell(found, "refused", f"{step} done again: {outcome.text}")
            break
    return found


def judge(root: Path, whole: Path, found: Counter[str]) -> None:
    """Compares a life at its end with one without kills."""
    charged, wanted = kills.charge(root), kills.charge(whole)
    if charged.attempts > wanted.attempts or charged.epsilon > wanted.epsilon:
        _tell(found, "doubled", f"charged {charged}, expected {wanted}")
    elif charged != wanted:
        _tell(found, "lost", f"charged {charged}, expected {wanted}")
    names = kills.differences("", kills.visible(root), kills.visible(whole))
    for text in [*names, *kills.secrets_left(root)]:
        _tell(found, "other", text)


def train(times: int, seed: int) -> Counter[str]:
    """Kills the real trainer so often and compares the bits."""
    from tests.components.train_dp_fedemb.test_train_kill import kill_and_compare

    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found["kills"] = kill_and_compare(Path(folder), times, seed)
        except AssertionError as error:
            _tell(found, "other", f"trainer, seed {seed}: {error}")
    return found


def _tell(found: Counter[str], what: str, text: str) -> None:
    found[what] += 1
    sys.stdout.write(f"{what}: {text}\n")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--training", type=int, default=0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31))
    asked = parser.parse_args()
    random, ends = np.random.default_rng(asked.seed), time.monotonic() + 60 * asked.minutes
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fedemb-kills-") as folder:
        kills.warm(Path(folder, "warm"))
        fresh = begin(Path(folder, "fresh", "run"))
        whole = Path(shutil.copytree(fresh, Path(folder, "whole", "run")))
        seconds = unbroken(whole)
        while total["kills"] < asked.kills and time.monotonic() < ends:
            root = Path(shutil.copytree(fresh, Path(folder, "life", "run")))
            found = live(root, seconds, random)
            if not found["refused"]:
                judge(root, whole, found)
            total += found + Counter(lives=1)
            shutil.rmtree(root.parent)
    if asked.training:
        total += train(asked.training, asked.seed)
    night = {"day": f"{kills.NOW:%Y-%m-%d}", "seed": asked.seed, **total}
    asked.record.parent.mkdir(parents=True, exist_ok=True)
    with asked.record.open("a") as file:
        file.write(json.dumps(night) + "\n")
    nights = [Counter(json.loads(line)) for line in asked.record.read_text().splitlines()]
    names = ("lives", "kills", "lost", "doubled", "broken", "refused", "other")
    sums = {name: sum(night[name] for night in nights) for name in names}
    sys.stdout.write(
        f"{len(nights)} nights: " + ", ".join(f"{sums[name]} {name}" for name in names) + "\n"
    )
    return int(any(sums[name] for name in names[2:]))


if __name__ == "__main__":
    sys.exit(main())
