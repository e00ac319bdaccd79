"""The pipeline of DP-SGD: from private images to a gated, signed release of a classifier."""

from fedemb.pipelines.graph import Pipeline

DP_SGD = Pipeline(
    "dp-sgd",
    "Image classifiers with differential privacy of a user, or of an image",
    (
        "plan_privacy",
        "pretrain_public",
        "reserve_budget",
        "partition_users",
        "train_dp_sgd",
        "evaluate_classifier",
        "audit_privacy",
        "account_privacy",
        "gate_release",
        "release_model",
    ),
)
