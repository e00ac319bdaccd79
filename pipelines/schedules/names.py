"""Names, labels and texts that Kubeflow Pipelines stores, within the limits of its database.

Kubeflow creates the Workflow of a run, and only then writes its row. A text that is too long for
its column gives HTTP 500 while the run continues, so every text is fitted before it is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedemb.config import RunConfig
from fedemb.errors import ConfigError
from fedemb.foundation.canonical_json import JsonFields, canonical_json, json_digest, sha256_hex
from fedemb.foundation.digests import file_digest
from fedemb.privacy.mechanisms.registry import plan_mechanism

LONGEST_TEXT = 255
"""Name or description of a run and of a recurring run: VARCHAR(255) in `run_details` and `jobs`."""
LONGEST_VERSION_NAME = 127
LONGEST_EXPERIMENT_NAME = 128
LONGEST_TAG = 63
"""Key or value of a tag of a version, and value of a label in Kubernetes."""
LONGEST_VERSION_TEXT = 65_535
"""Description of a version: a TEXT column."""
KEY_LABEL = "fedemb.dev/idempotency-key"
"""Label of every pod of a submitted run: `kubectl get pods -l fedemb.dev/idempotency-key=KEY`."""


def fitted(text: str, longest: int = LONGEST_TEXT) -> str:
    """Returns a text of at most `longest` bytes in UTF-8, and so of at most as many characters.

    A text that is cut ends with the first 8 digits of the SHA-256 of the whole, so that two long
    texts with the same prefix stay different.
    """
    data = text.encode()
    if len(data) <= longest:
        return text
    end = f"... [sha256 {sha256_hex(data)[:8]}]"
    return data[: longest - len(end)].decode(errors="ignore").rstrip() + end


def experiment_name(name: str) -> str:
    """Returns the name of an experiment, checked.

    Raises:
      ConfigError: longer than Kubeflow stores; two experiments must not be filed as one.
    """
    if len(name.encode()) > LONGEST_EXPERIMENT_NAME:
        raise ConfigError(
            f"experiment name has {len(name.encode())} bytes, and Kubeflow stores at most "
            f"{LONGEST_EXPERIMENT_NAME}. Pass a shorter name."
        )
    return name


_NO_RUN = ("beam_options", "mlflow")
"""Arguments that change neither the model nor the charge of a run."""


def idempotency_key(pipeline: str, arguments: JsonFields, resume: str | None) -> str:
    """Returns the key of all submissions of one configuration: 16 hexadecimal digits.

    A package that was compiled again, other Beam options and another MLflow server do not change
    the key: the run would train the same model and charge the same users. `resume` is the id of the
    run that the submission resumes.
    """
    bound = {name: value for name, value in arguments.items() if name not in _NO_RUN}
    content = {"pipeline": pipeline, "arguments": bound, "resume": resume}
    return sha256_hex(canonical_json(content))[:16]


def run_name(config: RunConfig, when: datetime, key: str, number: int, resume: str | None) -> str:
    """Returns the name of a submitted run: policy, week, model, key and number of the submission.

    Such as `glyphs 2027-W05 letters 3f9a2b7c41d05e68-1`. Two runs never have the same name.
    """
    name = f"{config.policy.policy_id} {week_of(when)} {config.release_name} {key}-{number}"
    return fitted(name if resume is None else f"{name} (resumes {resume})")


def recurring_run_name(config: RunConfig, schedule: str) -> str:
    """Returns the name of a recurring run: policy, model and schedule.

    Kubeflow names its runs by the first 25 characters, an index and a hash. The week is not in the
    name, because Kubeflow does not fill in dates there; its list shows the start of each run.
    """
    return fitted(f"{config.policy.policy_id}-{config.release_name}-{schedule}")


def week_of(when: datetime) -> str:
    """Returns the ISO week, such as `2027-W05`."""
    week = when.isocalendar()
    return f"{week.year}-W{week.week:02d}"


@dataclass(frozen=True)
class Version:
    """A version of a pipeline: a compiled package as one policy runs it with one plan."""

    policy: str
    package: str
    """Digest of its content."""
    plan: str
    """Digest of the privacy plan, as submissions and plans name it."""
    key: str = ""
    """Idempotency key of submitted runs: the pods of this version have the label `KEY_LABEL`."""

    @classmethod
    def of(cls, package: Path, config: RunConfig) -> Version:
        """Returns the version of a package and a configuration."""
        plan = json_digest(plan_mechanism(config).to_json())
        return cls(config.policy.policy_id, file_digest(package), plan)

    def name(self, when: datetime) -> str:
        """Returns the name in a list of versions: policy, week of the upload, package and plan."""
        return fitted(f"{self.policy} {week_of(when)} {self._digests()}", LONGEST_VERSION_NAME)

    def is_named(self, name: str) -> bool:
        """Whether a name is of this version, uploaded in any week."""
        policy, _, rest = name.partition(" ")
        return (policy, rest.rpartition(" ")[2]) == (self.policy, self._digests())

    def tags(self, when: datetime) -> dict[str, str]:
        """Returns the tags by which versions can be filtered."""
        digests = {"package": self.package[:32], "plan": self.plan[:32]}
        tags = {"policy": self.policy[:LONGEST_TAG], "week": week_of(when), **digests}
        return {**tags, "idempotency-key": self.key} if self.key else tags

    def _digests(self) -> str:
        digests = f"{self.package[:16]}-{self.plan[:16]}"
        return f"{digests}-{self.key}" if self.key else digests
