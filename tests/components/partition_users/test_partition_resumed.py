"""A resumed training keeps its original users, also those deleted since."""

import json

import pytest

from fedemb.data.hashing import Hasher
from fedemb.documents.run_artifacts import RunArtifacts
from fedemb.errors import PlanMismatch
from fedemb.keys import partition_key
from fedemb.keys.deletion_marks import mark_deleted
from fedemb.ledger import read_reservation
from fedemb.runtime.step_context import StepContext
from fedemb.steps.partition_users import partition
from fedemb.steps.plan_privacy import plan
from fedemb.steps.reserve_budget import reserve
from tests.kit.ledger_kit import connect
from tests.kit.pipeline_runs.partition_run import (
    make_config,
    rows_of,
    write_parquet,
)
from tests.kit.public_start import sign_start


class Team:
    """A run up to its partition, and a user who asks to be deleted."""

    def __init__(self, root):
        self.root = root
        marks = {"storage__deletion_marks": str(root / "marks")}
        self.config = make_config(write_parquet(root / "images.parquet", rows_of(30)), **marks)
        plan.run(self.context())
        sign_start(self.context())
        reserve.run(self.context())
        self.manifest = partition.run(self.context())

    def context(self):
        names = ("privacy_plan", "reservation", "users")
        stores = {name: str(self.root / name) for name in ("private_root", "ledger", "keys")}
        documents = {name: self.root / f"{name}.json" for name in names}
        artifacts = RunArtifacts(**documents, pretrained=self.root / "pretrained")
        return StepContext(artifacts, config=self.config, run_id="monday", **stores)

    def begin(self):
        """Binds, as the trainer does before its first round; again it must be the same."""
        context = self.context()
        ledger = connect(context.ledger_uri, context.keys_uri, self.config.policy.policy_id)
        manifest = json.loads((self.root / "users.json").read_text())
        ledger.bind(
            read_reservation(context.artifacts.reservation),
            inputs_sha="1" * 64,
            commitments=manifest["commitments"],
            private_root="2" * 64,
        )

    def forget(self, user):
        keys, policy_id = self.context().keys, self.config.policy.policy_id
        hasher = Hasher(partition_key(keys, policy_id))
        mark = hasher.deletion_mark(hasher.user_key(user))
        mark_deleted(self.config.storage.deletion_marks, keys, policy_id, mark)


def test_forgetting_somebody_does_not_burn_the_charge_of_a_run_that_began(tmp_path):
    """Planted last: a partition that reads only the data selects other users."""
    made = Team(tmp_path)
    made.begin()
    made.forget("user 3")
    reserve.run(made.context())
    assert partition.run(made.context()) == made.manifest
    made.begin()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "_begun_with", lambda *_: None)
        assert partition.run(made.context())["commitments"] != made.manifest["commitments"]
    with pytest.raises(PlanMismatch, match="bound to other commitments"):
        made.begin()


@pytest.mark.long
def test_commitments_do_not_tell_whether_who_was_forgotten_had_trained(tmp_path):
    """Two passes of one attempt before it is bound: a user deleted between them was in the data, or
    not, and the public commitments change either way."""
    made = Team(tmp_path)
    assert partition.run(made.context()) == made.manifest
    made.forget("unknown user")
    found = partition.run(made.context())["commitments"]
    for kind, before in made.manifest["commitments"].items():
        assert found[kind] != before
