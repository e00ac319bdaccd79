"""One setting after another is broken: what is charged is never refused later, but for its data.

At night, `BREAKS` drawn breaks of each kind of training; SEED=number repeats a night.
"""

import os
import random
import secrets

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from fedemb.data.pixels import encode_png
from fedemb.documents.artifacts import RunArtifacts
from fedemb.errors import FedEmbError, GateDenied
from fedemb.runtime.step_context import StepContext
from fedemb.steps import (
    account_privacy,
    audit_privacy,
    evaluate_model,
    gate_release,
    partition_users,
    plan_privacy,
    pretrain_public,
    release_model,
    reserve_budget,
    train_model,
)
from tests.components.train_model.test_rehearsal import CONFIGS
from tests.kit.pipeline_runs.honest_run import FILES
from tests.kit.pipeline_runs.training_run import SIZE

SEED = os.environ.get("SEED") or secrets.token_hex(4)
BREAKS = int(os.environ.get("BREAKS", "12"))
RELEASE = {
    "purpose": "release",
    "partition.evaluation": {"by": "hash", "fraction": 0.25},
    "evaluation.bootstrap_samples": 20,
    "audit.bootstrap_samples": 20,
    "data.source.label_scope": "global",
    "policy.users_lower_bound": 1500,
    "policy.delta": 1e-4,
    "policy.composition": "planned",
    "mechanism.noise_multiplier": 8.0,
}
OF_THE_DATA = ("InputError", "GateDenied")
"""Errors after the charge that photos or the measured model cause, never a setting alone."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of sixty users, each of two of the three classes."""
    drawn = np.random.default_rng(0)
    rows = [
        {
            "image": encode_png(drawn.integers(0, 256, (SIZE, SIZE, 1), np.uint8)),
            "user_id": f"user {user}",
            "label": "abc"[(user + image) % 3],
        }
        for user in range(60)
        for image in range(3)
    ]
    path = tmp_path_factory.mktemp("photos") / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def leaves(tree, *above):
    """Yields dotted names of settings and their values."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, *above, name)
        else:
            yield ".".join((*above, name)), value


def broken(value):
    """Returns other values of a setting; the configuration refuses some."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, 1, 2, value + 1, 2 * value]
    if isinstance(value, float):
        return [0.0, 1e-9, value / 3, 3 * value, 1.0]
    if isinstance(value, list):
        return [[], value[:-1]]
    return [None, 1, 0.5, "x", True]


def refusal(config, root) -> tuple[bool, FedEmbError | None]:
    """Whether a run was charged, and what refused it."""
    pages = {f"{name}_page": root / f"{name}.html" for name in ("audit", "utility")}
    paths = {name: root / file for name, file in FILES.items()}
    context = StepContext(
        RunArtifacts(**paths, **pages),
        config=config,
        run_id="run-1",
        **{name: str(root / name) for name in ("private_root", "ledger", "keys", "releases")},
    )
    charged = False
    try:
        plan_privacy.run(context)
        pretrain_public.run(config.backbone_config(), context.artifacts.pretrained, context.keys)
        reserve_budget.run(context)
        charged = True
        for step in (partition_users, train_model, evaluate_model, audit_privacy):
            step.run(context)
        for step in (account_privacy, gate_release, release_model):
            step.run(context)
    except FedEmbError as error:
        return charged, error
    return charged, None


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(CONFIGS.keys() - {"averaged"}))  # no release of DP-FedAvg
def test_invalid_settings_are_refused_before_the_charge(kind, photos, tmp_path):
    sound = CONFIGS[kind].updated({**RELEASE, "data.source.uri": photos})
    charged, error = refusal(sound, tmp_path / "sound")
    assert charged, error
    assert error is None or isinstance(error, GateDenied), error
    tree, tried, found = sound.model_dump(mode="json"), 0, []
    settings = [(name, other) for name, value in leaves(tree) for other in broken(value)]
    random.Random(f"{SEED} {kind}").shuffle(settings)
    for name, value in settings:
        try:
            config = sound.updated({name: value})
        except ValidationError:
            continue
        charged, error = refusal(config, tmp_path / str(tried))
        tried += charged
        if charged and error is not None and type(error).__name__ not in OF_THE_DATA:
            found.append(f"{name}={value!r}: {error}")
        if tried == BREAKS:
            break
    assert not found, f"SEED={SEED}"
    assert tried >= min(BREAKS, 10)
