"""A small honest run without training: what the gate must allow, and every test then bends.

Plan, reservation, ledger, signatures and report are made by the real code; only the images and the
rounds are missing: the model's tensors are drawn here.
"""

import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedemb.config import RunConfig
from fedemb.config.run import config_digest
from fedemb.documents.artifacts import RunArtifacts
from fedemb.documents.audit import AuditReport
from fedemb.documents.ledger_record import LedgerRecord
from fedemb.documents.model import ModelCard
from fedemb.documents.privacy_report import PrivacyReport
from fedemb.documents.utility import UtilityReport, baselines_of, embedding_space_id
from fedemb.foundation.canonical_json import canonical_json, file_digest, json_digest
from fedemb.foundation.document import encode, read
from fedemb.foundation.files import write_bytes
from fedemb.keys import open_key_store
from fedemb.keys.trust import Signer, sign_document, write_signed
from fedemb.ledger import read_reservation
from fedemb.privacy.guarantee import event_to_json
from fedemb.privacy.registry import plan_from_json
from fedemb.reports import charts, pages
from fedemb.runtime.step_context import StepContext
from fedemb.steps import account_privacy, gate_release, plan_privacy, release_model, reserve_budget
from tests.kit.document_kinds import all_documents
from tests.kit.ledger_kit import connect
from tests.kit.signed_backbone import keras_file, no_rehearsal, sign_start, sign_users
from tests.kit.verified import problems_of

TENSORS = [
    {"name": "block1_conv/kernel", "shape": [3, 3, 1, 4]},
    {"name": "block1_conv/bias", "shape": [4]},
    {"name": "embedding/kernel", "shape": [4, 8]},
]
PRIVATE_ROOT = "5" * 64
SELF_TEST = {
    "no_leak": {"auroc": 0.501, "alarms": 2, "trials": 40},
    "planted_leak": {"value": 0.818, "low": 0.78, "high": 0.86},
    "reversed_sign": {"value": 0.182, "low": 0.14, "high": 0.22},
    "missing_score_refused": True,
    "missing_side_refused": True,
}
_DRAWN = {}


def _line_chart(lines, **words):
    """Equal charts are drawn once: drawing takes longer than all else that these runs do."""
    key = repr((lines, words))
    if key not in _DRAWN:
        _DRAWN[key] = charts.line_chart(lines, **words)
    return _DRAWN[key]


pages.line_chart = _line_chart
ROLES = {document.kind: document.role for document in all_documents()} | {"ledger_record": "ledger"}


def spelled(fields):
    """The bytes of a document as its step writes them: records of the ledger on one line."""
    return encode(fields, compact=fields.get("schema") == LedgerRecord.schema_name())


def mechanism_audit(plan):
    """What the trainer finds of an honest mechanism."""
    return {
        "receipts": {
            "rounds": plan.rounds,
            "failed": 0,
            "together": True,
            "normals": 99,
            "scaled": True,
        },
        "fold": {"rounds": plan.rounds, "same": True},
        "replay": {"rounds": 2, "failed": []},
    }


COMMITMENTS = {"users": "2" * 64, "evaluation": "3" * 64}


def config(**changes) -> RunConfig:
    """Fewer rounds and more noise than any real run: cheap to price, small epsilon."""
    base = RunConfig.model_validate(
        {
            "purpose": "release",
            "data": {"source": {"uri": "private.parquet"}},
            "partition": {"virtual_clients": 400},
            "model": {"backbone": "lenet", "embedding_dim": 8},
            "mechanism": {
                "kind": "group_poisson_gaussian",
                "rounds": 6,
                "sampling_probability": 0.05,
                "noise_multiplier": 2.0,
            },
            "policy": {
                "policy_id": "weekly",
                "users_lower_bound": 20_000,
                "delta": 1e-5,
                "epsilon_cap": 3.0,
                "renyi_order": 8.0,
            },
            "release": {"name": "glyphs", "version": "1.0"},
            "tuning": {"data": "public", "method": "on drawn glyphs"},
        }
    )
    return base.updated(changes) if changes else base


def model_file(tensors=TENSORS, names=None, seed=0) -> bytes:
    """A `keras_file` of random numbers."""
    random, found = np.random.default_rng(seed), {}
    for position, tensor in enumerate(tensors):
        name = names[position] if names else f"layers/conv2d_{position}/vars/0"
        found[name] = random.normal(size=tensor["shape"])
    return keras_file(found)


def write_model_file(path: Path, tensors=TENSORS, names=None, seed=0) -> None:
    """Writes a `model_file`."""
    write_bytes(path, model_file(tensors, names, seed))


INITIAL = model_file(seed=1)
OUTPUTS = {
    "plan_privacy": {"privacy_plan": "plan.json"},
    "pretrain_public": {"pretrained": "pretrained"},
    "reserve_budget": {"reservation": "reservation.json"},
    "partition_users": {"users": "users.json"},
    "train_model": {"model": "model"},
    "evaluate_model": {"utility_report": "utility.json"},
    "audit_privacy": {"audit_report": "audit.json"},
    "account_privacy": {"privacy_report": "report.json", "privacy_page": "report.html"},
    "gate_release": {"verdict": "verdict.json", "verdict_page": "verdict.md", "lineage": "lineage"},
    "release_model": {"release": "release.json"},
}
"""Step -> output -> its file or folder in the root of a run."""
FILES = {name: file for outputs in OUTPUTS.values() for name, file in outputs.items()}
PLACES = [(step, name) for step, outputs in OUTPUTS.items() for name in outputs]
"""Step and output."""
NAMES = {
    "plan": "privacy_plan",
    "audit": "audit_report",
    "utility": "utility_report",
    "report": "privacy_report",
    "page": "privacy_page",
}
"""What tests call some outputs."""


@dataclass
class HonestRun:
    """One run; each of its outputs is a path, as `run.model` or `run.report`."""

    root: Path
    run_id: str
    config: RunConfig
    policy_root: Path

    def __getattr__(self, name):
        file = FILES.get(NAMES.get(name, name))
        if file is None:
            raise AttributeError(name)
        return self.root / file

    @property
    def start(self):
        return self.pretrained / "pretrained.json"

    @property
    def artifacts(self):
        return self.context().artifacts

    def context(self, *, releases=None, **paths):
        """What every step of the run is given: each gets a fresh one, as in a pod.

        `releases` and `paths` take the place of the run's own.
        """
        artifacts = {name: self.root / file for name, file in FILES.items()}
        return StepContext(
            RunArtifacts(**artifacts | paths),
            config=self.config,
            run_id=self.run_id,
            private_root=str(self.root / "private"),
            ledger=self.ledger_uri,
            keys=self.keys_uri,
            releases=releases or self.releases_uri,
        )

    @property
    def ledger_uri(self):
        return str(self.policy_root / "ledger")

    @property
    def keys_uri(self):
        return str(self.policy_root / "keys")

    @property
    def releases_uri(self):
        return str(self.root / "releases")

    @property
    def bundle(self):
        """Folder of the release."""
        return self.root / "releases" / "glyphs" / "1.0"

    @property
    def trust(self):
        """The file of the keys that a reader of the release pins."""
        return Path(self.ledger_uri, "trust.json")

    @property
    def keys(self):
        return open_key_store(self.keys_uri)

    def ledger(self):
        return connect(self.ledger_uri, self.keys_uri, self.config.policy.policy_id)

    def sign(self, path, document):
        """Writes a document as its step does."""
        write_signed(path, document, Signer.newest(self.keys, document.role))

    def rewrite(self, path, **changes):
        """Changes fields of a document and signs it again, as somebody inside its step could."""
        fields = {**json.loads(path.read_text()), **changes}
        signer = Signer.newest(self.keys, ROLES[fields["schema"].split("/")[1]])
        write_bytes(path, spelled(sign_document(fields, signer)))

    # ---- the steps, in order ----

    def do_plan(self):
        return plan_privacy.run(self.context())

    def do_reserve(self, **options):
        if not self.start.exists():
            self.do_pretrain()
        return reserve_budget.run(self.context(), rehearse=no_rehearsal, **options)

    def do_pretrain(self):
        """Says of the public backbone that pretrain_public made it."""
        sign_start(self.context(), images=900, classes=30, final_loss=0.5)

    def do_partition(self):
        sign_users(self.context(), COMMITMENTS)

    def inputs_sha(self):
        reservation = read_reservation(self.reservation)
        return json_digest(
            {
                "plan_sha": reservation.plan_sha,
                "config_sha": reservation.config_sha,
                "initial_weights_sha": file_digest(self.start.with_name("backbone.keras")),
                "data_commitment": COMMITMENTS["users"],
                "code_sha": reservation.code_sha,
            }
        )

    def do_bind(self):
        reservation = read_reservation(self.reservation)
        self.ledger().bind(
            reservation,
            inputs_sha=self.inputs_sha(),
            commitments=COMMITMENTS,
            private_root=PRIVATE_ROOT,
        )

    def do_train(self, tensors=TENSORS):
        """Binds, pretends to train, commits."""
        reservation = read_reservation(self.reservation)
        mechanism = plan_from_json(json.loads(self.plan.read_text())["plan"])
        self.do_bind()
        event = event_to_json(mechanism.round_event)
        lines = [
            {
                "round": index,
                "clients_planned": mechanism.normalizer,
                "event": event,
                "output_sha": f"{index:064x}",
            }
            for index in range(mechanism.rounds)
        ]
        self.write_rounds(lines)
        if not (self.model / "backbone.keras").exists():
            write_model_file(self.model / "backbone.keras", tensors)
        body = {
            "run_id": self.run_id,
            "attempt": reservation.attempt,
            "config_sha": reservation.config_sha,
            "plan_sha": reservation.plan_sha,
            "inputs_sha": self.inputs_sha(),
            "initial_weights_sha": file_digest(self.start.with_name("backbone.keras")),
            "weights_sha": file_digest(self.model / "backbone.keras"),
            "key_injected": False,
            "rounds_run": mechanism.rounds,
            "tensors": tensors,
            "backbone": self.config.model.backbone,
            "embedding_dim": self.config.model.embedding_dim,
            "code_sha": reservation.code_sha,
            "mechanism_audit": mechanism_audit(mechanism),
        }
        self.sign(self.model / "model.json", ModelCard.of_fields(body))
        self.do_commit()

    def write_rounds(self, lines):
        """The round log of these lines, in the trainer's own form."""
        data = b"".join(canonical_json(line) + b"\n" for line in lines)
        write_bytes(self.model / "rounds.jsonl", data)

    def do_commit(self):
        reservation = read_reservation(self.reservation)
        rounds = len((self.model / "rounds.jsonl").read_text().splitlines())
        ledger = self.ledger()
        ledger.commit(
            reservation,
            rounds_started=rounds,
            round_log_sha=file_digest(self.model / "rounds.jsonl"),
            card_sha=file_digest(self.model / "model.json"),
            signer=Signer.current(self.keys, "trainer", ledger.chain.trust),
            keys=self.keys,
        )

    def do_measure(self):
        self.do_evaluate()
        self.do_audit()

    def _of_model(self, section):
        model = json.loads((self.model / "model.json").read_text())
        digest = config_digest(self.config, section)
        return model, {
            "run_id": self.run_id,
            "model_sha": model["weights_sha"],
            "config_sha": digest,
        }

    def do_audit(self):
        model, common = self._of_model("audit")
        audit = {
            **common,
            "code_sha": model["code_sha"],
            "attack": "verification_score",
            "unit": self.config.policy.unit,
            "self_test": SELF_TEST,
            "figures": "private",
            "split_by_value": False,
            "users_at_most": self.config.audit.max_users,
            "bootstrap_samples": self.config.audit.bootstrap_samples,
            "measured": None,
            "mechanism": model["mechanism_audit"],
        }
        self.sign(self.audit, AuditReport.of_fields(audit))

    def do_evaluate(self):
        model, common = self._of_model("evaluation")
        estimate = {"value": 0.5, "low": 0.4, "high": 0.6}
        difference = {"value": 0.0, "low": -0.1, "high": 0.1}
        recall = {"0.001": {**estimate, "threshold": 0.7}, "0.01": {**estimate, "threshold": 0.3}}
        retrieval = {
            "recall_at": {"1": estimate, "5": estimate},
            "mean_average_precision": estimate,
            "nearest_neighbour": estimate,
            "queries": 3600,
            "identities_with_match": 200,
        }
        roc = {"far": [0.001, 0.01], "recall": [0.5, 0.9], "threshold": [0.7, 0.3]}
        measured = {"recall_at_far": recall, "retrieval": retrieval}

        def start(value):
            """Measured where the model reads 0.5, with a tenth on both sides of every figure."""
            found = {"value": value, "low": value - 0.1, "high": 0.6}
            gain = {"value": 0.5 - value, "low": 0.4 - value, "high": 0.6 - value}
            return {
                **measured,
                "recall_at_far": {rate: {**old, **found} for rate, old in recall.items()},
                "roc": roc,
                "difference": dict.fromkeys(recall, gain),
            }

        utility = {
            **common,
            **measured,
            "embedding_space_id": embedding_space_id(model["weights_sha"], self.config.model),
            "simulation": False,
            "public_kind": self.config.pretraining.kind,
            "bootstrap": {
                "samples": self.config.evaluation.bootstrap_samples,
                "unit": "user",
                "groups": None,
            },
            "headline_rate": "0.001",
            "evaluated": {
                "images": 3600,
                "identities": 900,
                "positive_pairs": 5400,
                "negative_pairs": 6_472_800,
            },
            "roc": roc,
            **dict.fromkeys(UtilityReport.baselines),
            **{name: start(0.1) for name in baselines_of(self.config)},
            "public_backbone": start(0.3),
            "centralized": None,
            "utility_drop": None,
            "subgroups": {
                "measured": [
                    {
                        "name": "north",
                        "images": 40,
                        "identities": 10,
                        "recall_at_own_threshold": estimate,
                        "recall_at_common_threshold": None,
                        "false_accept_rate_at_common_threshold": estimate,
                    }
                ],
                "too_small": 2,
            },
            "previous_release": {
                "old_model_sha": "6" * 64,
                "old_embedding_space_id": "es-" + "6" * 20,
                "old": measured,
                "new_against_old": measured,
                "change": dict.fromkeys(recall, difference),
            },
        }
        self.sign(self.utility, UtilityReport.of_fields(utility))

    def do_account(self):
        return account_privacy.run(self.context())

    def waive(self, code, reason="agreed", model_sha=None):
        """Signs a waiver of the policy owner for the model of this run, or for another."""
        return self.ledger().decide(
            read_reservation(self.reservation),
            code=code,
            model_sha=model_sha
            or json.loads((self.model / "model.json").read_text())["weights_sha"],
            report_sha=None,
            reason=reason,
            signer=Signer.load_or_create(self.keys, "policy"),
        )

    def approve(self, signer):
        """Signs an approval of the report."""
        report = read(self.report, PrivacyReport)
        return self.ledger().decide(
            read_reservation(self.reservation),
            code="not_approved",
            model_sha=report.body.model_sha,
            report_sha=report.sha,
            reason="",
            signer=signer,
        )

    def do_gate(self):
        return gate_release.run(self.context())

    def do_release(self):
        """Releases with a stand-in for the serving model; `test_release_model` has a real one."""
        with stand_in_for_serving():
            return release_model.run(self.context())

    def problems(self):
        """What `fedemb verify` says of the release, the SavedModel left out."""
        with stand_in_for_serving():
            return problems_of(str(self.bundle), self.trust, self.ledger_uri)

    def do(self, acts):
        """Does the steps that a text names, one after the other; returns itself."""
        for act in acts.split():
            getattr(self, f"do_{act}")()
        return self

    def until_gate(self):
        return self.do("plan pretrain reserve partition train measure account")

    def until_release(self):
        return self.until_gate().do("gate release")


@contextmanager
def stand_in_for_serving():
    """Replaces one module by `fake_serving`, and restores it.

    `mock.patch.dict("sys.modules")` would also forget what was imported meanwhile.
    """
    from tests.kit.servers import fake_serving

    name = "fedemb.release.released"
    before = sys.modules.get(name)
    sys.modules[name] = fake_serving
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def at(root: Path, run_id: str = "monday") -> HonestRun:
    """A run that was started before, with the default configuration."""
    return HonestRun(root, run_id, config(), root / "policy")


def start(root: Path, run_id: str = "monday", policy_root: Path | None = None, **changes):
    """A run whose steps were not done yet."""
    write_bytes(root / "pretrained" / "backbone.keras", INITIAL)
    return HonestRun(root, run_id, config(**changes), policy_root or root / "policy")


def copy_of(run: HonestRun, root: Path) -> HonestRun:
    """A copy of a run, to bend."""
    shutil.copytree(run.root, root)
    return HonestRun(root, run.run_id, run.config, root / "policy")


def before_acts(root: Path) -> Path:
    """Copies of a run right before each act on the ledger, in folders of their names."""
    run = start(root / "now")
    run.do_plan()
    shutil.copytree(run.root, root / "reserve")
    run.do_reserve()
    run.do_partition()
    shutil.copytree(run.root, root / "bind")
    run.do_commit, commit = (lambda: None), run.do_commit
    run.do_train()
    shutil.copytree(run.root, root / "commit")
    commit()
    run.do_measure()
    shutil.copytree(run.root, root / "account")
    run.do_account()
    run.do_gate()
    shutil.copytree(run.root, root / "release")
    return root
