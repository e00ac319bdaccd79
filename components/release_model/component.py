"""KFP face of release_model."""

from kfp import dsl

from fedemb.documents.artifacts import Public
from fedemb.runtime.step import Rights, step


@step(
    image="cpu",
    private=False,
    resources="serve",
    outputs={"release": Public},
    rights=Rights(ledger="append", signing=("ledger", "release"), releases="create"),
)
def release_model(
    config: str,
    ledger: str,
    keys: str,
    releases: str,
    privacy_plan: dsl.Input[dsl.Artifact],
    reservation: dsl.Input[dsl.Artifact],
    users: dsl.Input[dsl.Dataset],
    pretrained: dsl.Input[dsl.Model],
    model: dsl.Input[dsl.Model],
    privacy_report: dsl.Input[dsl.Artifact],
    audit_report: dsl.Input[dsl.Artifact],
    utility_report: dsl.Input[dsl.Artifact],
    verdict: dsl.Input[dsl.Artifact],
    release: dsl.Output[dsl.Artifact],
):
    """Verifies again, then publishes the signed bundle by exclusive create."""
    from fedemb.runtime.step import step_process
    from fedemb.steps.release_model.release import run

    with step_process("release_model", locals()) as context:
        published = run(context)
        release.metadata.update(
            published_at=published.get("uri", ""), bundle_sha=published.get("bundle_sha", "")
        )
