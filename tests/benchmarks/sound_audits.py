"""Audits of sound trainings, as many as one asks for: how often one of them fails.

`python -m tests.benchmarks.sound_audits 200` trains the smallest real plan (DP-SGD of a head on
three rounds of about twelve users) so often, each time under another key, and prints how many
audits failed and of what. By design a check fails a sound run with a chance of 2e-9.
"""

from __future__ import annotations

import collections
import secrets
import shutil
import sys
import tempfile
from pathlib import Path


def main(runs: int) -> None:
    """Prints a line after every ten runs."""
    from fedemb.documents.audit import MechanismAudit
    from fedemb.privacy.mechanisms.registry import plan_mechanism
    from fedemb.steps import train_dp_sgd
    from tests.kit.pipeline_runs.training_run import ReadyRun, classifier_config, prepare

    config = classifier_config(
        **{
            "model.trainable": "head",
            "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
        }
    )
    failed: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        ready = prepare(Path(folder) / "ready", config)
        for number in range(1, runs + 1):
            root = Path(folder) / "run"
            shutil.copytree(ready.root, root)
            card = train_dp_sgd.run(
                ReadyRun(root, config).context(), root_key=secrets.token_bytes(32)
            )
            evidence = MechanismAudit.model_validate(card["mechanism_audit"])
            failed.update(evidence.failed(plan_mechanism(config)))
            shutil.rmtree(root)
            if number % 10 == 0 or number == runs:
                sys.stdout.write(f"{number} sound runs, failed: {dict(failed)}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
