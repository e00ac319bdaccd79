"""The pipeline of DP-FedEmb: from private images to a gated, signed release of embeddings."""

from fedemb.pipelines.graph import Pipeline

DP_FEDEMB = Pipeline(
    "dp-fedemb",
    "Image embeddings with user-level privacy",
    (
        "plan_privacy",
        "pretrain_public",
        "reserve_budget",
        "partition_users",
        "train_dp_fedemb",
        "evaluate_embeddings",
        "audit_privacy",
        "account_privacy",
        "gate_release",
        "release_model",
    ),
)
