"""A small run up to the point where training starts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemb.config import RunConfig
from fedemb.data.pixels import encode_png
from fedemb.data.records import UserRecord
from fedemb.documents.artifacts import RunArtifacts
from fedemb.foundation.canonical_json import tree_digest
from fedemb.foundation.document import Document
from fedemb.keys import commit_to_users, commitment_key, open_key_store
from fedemb.keys.trust import Signer, write_signed
from fedemb.runtime.step_context import StepContext
from tests.kit.pipeline_runs.partition_run import write_store
from tests.kit.signed_backbone import no_rehearsal, sign_users

SIZE = 12
RUN_ID = "run-1"


def config(**changes: Any) -> RunConfig:
    """Six rounds of about six small virtual clients."""
    tree = {
        "purpose": "simulation",
        "tuning": {"data": "public", "method": "on drawn glyphs"},
        "data": {"source": {"uri": "private.parquet"}},
        "partition": {"virtual_clients": 12},
        "model": {"backbone": "tiny", "embedding_dim": 8, "image_size": SIZE},
        "mechanism": {
            "kind": "group_poisson_gaussian",
            "rounds": 6,
            "noise_multiplier": 1.0,
            "sampling_probability": 0.5,
        },
        "training": {"parallel_clients": 2, "local": {"batch_size": 5}},
        "policy": {
            "users_lower_bound": 100,
            "delta": 1e-3,
            "epsilon_cap": 1000.0,
            "renyi_order": 2.0,
        },
    }
    return RunConfig.model_validate(tree).updated(changes)


def classifier_config(**changes: Any) -> RunConfig:
    """Three rounds of DP-SGD over about twelve users."""
    tree = config().model_dump(mode="json") | {
        "task": "classification",
        "mechanism": {
            "kind": "poisson_gaussian",
            "rounds": 3,
            "noise_multiplier": 1.0,
            "sampling_probability": 0.3,
            "units_per_round": 12,
        },
        "training": {
            "algorithm": "dp_sgd",
            "parallel_clients": 2,
            "unit_gradient": {"images_per_unit": 2, "microbatch": 4, "views": 2, "flip": True},
        },
    }
    tree["model"] |= {"backbone": "tanh_cnn", "classes": ["a", "b", "c"]}
    tree["data"]["source"]["label_scope"] = "global"
    return RunConfig.model_validate(tree).updated(changes)


def covariance_config(**changes: Any) -> RunConfig:
    """The only round of a projection solved from covariances, of all users."""
    return config(
        **{
            "model.trainable": "projection",
            "model.embedding_dim": 88,  # the features of the tiny network
            "training.algorithm": "dp_covariance",
            "mechanism": {"kind": "covariance", "noise_multiplier": 1.0, "units_per_round": 40},
            **changes,
        }
    )


TREE = {
    "mechanism": {
        "kind": "tree_aggregation",
        "rounds": 6,
        "noise_multiplier": 1.0,
        "clients_per_round": 4,
    }
}
"""Changes of `config`: noise that rounds share, and clients in turn."""
HEAD = {
    "model.trainable": "head",
    "training.unit_gradient": {"images_per_unit": 2, "microbatch": 4},
}
"""Changes of `classifier_config`, as are the others below: its head alone, on kept features."""
IMAGES = {
    "mechanism": {
        "kind": "capped_image_poisson",
        "rounds": 3,
        "noise_multiplier": 3.0,
        "sampling_probability": 0.3,
        "images_per_round": 90,
    },
    "training.unit_gradient": {"images_per_unit": 1, "microbatch": 4},
    "partition.max_images_per_user": 4,
    "policy.composition": "planned",
}
"""Images with coins of their own; what a user gives is capped."""


def write_users(
    folder: Path,
    *,
    users: int,
    virtual_clients: int,
    groupings: int,
    classes: int = 0,
    size: int = SIZE,
) -> None:
    """A user store by hand: blobs with noise, three images a user.

    Of two classes, one of them the user's own; or of the first `classes` classes.
    """
    random = np.random.default_rng(0)
    keys = np.sort(random.integers(0, 2**63, users, dtype=np.uint64))
    records = []
    for key in keys:
        blobs = random.integers(0, 256, (3, size, size, 1), np.uint8)
        labels = (int(key >> np.uint64(2)), int(key >> np.uint64(2)), 7)
        if classes:
            labels = tuple(int(n) for n in random.integers(0, classes, 3))
        records.append(UserRecord(int(key), tuple(encode_png(blob) for blob in blobs), labels))
    groups = random.integers(0, virtual_clients, (groupings, users)).astype(np.uint32)
    write_store(folder, records, size, groups if groupings else None, virtual_clients)


class Unaudited:
    """Instead of a `RoundAudit`: reads nothing, keeps nothing, finds nothing."""

    rounds = -1

    def __init__(self, *_: Any) -> None:
        """Accepts every record."""

    def nothing(self, *_: Any) -> None:
        """Does nothing."""

    restore = save = replay = nothing

    def evidence(self, *_: Any) -> None:
        """Evidence that is none."""


class Killed(BaseException):
    """What a test raises where a kill would strike."""


@contextmanager
def killed_at(owner: Any, name: str, number: int = 1, *, after: bool = False) -> Iterator[None]:
    """A trainer inside dies before or after the n-th call of a function."""
    sound, calls = getattr(owner, name), 0

    def killing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            raise Killed
        result = sound(*arguments, **named)
        if calls == number:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, killing)
        with pytest.raises(Killed):
            yield


@dataclass
class ReadyRun:
    """Everything training needs, in one folder."""

    root: Path
    config: RunConfig

    def context(
        self,
        run_config: RunConfig | None = None,
        outputs: Path | None = None,
        *,
        run_id: str = RUN_ID,
        private: str = "private",
        model: str = "model",
    ) -> StepContext:
        """What a step of the run is given.

        Args:
          run_config: another configuration.
          outputs: folder of reports and pages.
          run_id: another run of the same ledger.
          private, model: names of those folders.
        """
        made = outputs or self.root
        artifacts = RunArtifacts(
            privacy_plan=self.root / "plan.json",
            reservation=self.root / "reservation.json",
            users=self.root / "users.json",
            pretrained=self.root / "pretrained",
            model=self.root / model,
            **{f"{name}_report": made / "report.json" for name in ("utility", "audit")},
            **{f"{name}_page": made / "report.html" for name in ("utility", "audit")},
        )
        return StepContext(
            artifacts,
            config=run_config or self.config,
            run_id=run_id,
            private_root=str(self.root / private),
            ledger=str(self.root / "ledger"),
            keys=str(self.root / "keys"),
        )

    @property
    def private(self) -> Path:
        """Raw artifacts of the run."""
        return self.root / "private" / RUN_ID

    def commitments(self, run_id: str = RUN_ID) -> dict[str, str]:
        """What partition_users says of both folders; of one that was not written, nothing true."""
        keys = open_key_store(str(self.root / "keys"))
        key = commitment_key(keys, self.config.policy.policy_id)
        return {
            people: commit_to_users(key, run_id, 1, tree_digest(self.private / people))
            for people in ("users", "evaluation")
        }

    def sign(self, path: Path, document: Document) -> None:
        """Writes a document as its step does."""
        keys = open_key_store(str(self.root / "keys"))
        write_signed(path, document, Signer.newest(keys, str(document.role)))

    def sign_users(self) -> None:
        """Signs the manifest of both folders."""
        sign_users(self.context(), self.commitments())

    def copy(self, root: Path) -> ReadyRun:
        """The same run in another folder."""
        return ReadyRun(shutil.copytree(self.root, root), self.config)

    def train(self, run_config: RunConfig | None = None) -> dict[str, Any]:
        """Runs the step."""
        from fedemb.steps import train_model

        return train_model.run(self.context(run_config))


def prepare(
    root: Path,
    run_config: RunConfig | None = None,
    *,
    users: int = 40,
    rehearse: Any = no_rehearsal,
) -> ReadyRun:
    """Plans, reserves, writes users and initial weights."""
    from fedemb.steps import plan_privacy, pretrain_public, reserve_budget

    ready = ReadyRun(root, run_config or config())
    settings = ready.config
    keys = open_key_store(str(root / "keys"))
    plan_privacy.run(ready.context())
    pretrain_public.run(settings.backbone_config(), root / "pretrained", keys)
    reserve_budget.run(ready.context(), input_fingerprint="private.parquet@1", rehearse=rehearse)
    write_users(
        ready.private / "users",
        users=users,
        virtual_clients=settings.partition.virtual_clients,
        groupings=settings.partition.groupings,
        classes=len(settings.model.classes),
        size=settings.model.image_size,
    )
    held_out = {"virtual_clients": 0, "groupings": 0, "classes": len(settings.model.classes)}
    write_users(ready.private / "evaluation", users=30, size=settings.model.image_size, **held_out)
    ready.sign_users()
    return ready


def round_times(ready: ReadyRun) -> list[float]:
    """When each round came on record, in order."""
    records = (ready.private / "train").glob("attempt-*/rounds/*.record")
    return sorted(path.stat().st_mtime for path in records)
