"""Which rows there are, in the order of what they teach, and the recipes that selection chose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedemb.config import RunConfig
from fedemb.pipelines.run.load_config import load_config, with_data
from studies.utility.rows import IN_ROUNDS, NOISE, Method, Row

PRESET = "omniglot_identities"
LOCAL: dict[str, Any] = {
    "epochs": 2,
    "batch_size": 32,
    "client_learning_rate": 0.05,
    "head_learning_rate_scale": 25.0,
    "head_init": "prototypes",
    "loss": {"kind": "normalized_softmax", "scale": 16.0},
    "augmentation": {},
}
SERVER: dict[str, Any] = {
    "learning_rate": 1.0,
    "momentum": 0.9,
    "schedule": "cosine",
    "ema_decay": 0.9,
}


def base_config(data: str) -> RunConfig:
    """Data, model and public start of the preset, and a plain recipe that rows depart from."""
    config = with_data(load_config(PRESET), data)
    return config.updated(
        {
            "training": {"local": LOCAL, "server": SERVER},
            "mechanism.rounds": 40,
            "evaluation.centralized_epochs": 15,
            "pretraining.epochs": 20,
        }
    )


ROUNDS = 90
NOISE_OF_ABLATIONS = 3e-3
SEEDS = (0, 1, 2)
BFLOAT16: dict[str, Any] = {"training.mixed_precision": True}
COSFACE: dict[str, Any] = {"training.local.loss": {"kind": "cosface"}}
CLIP_OF_LITTLE_NOISE = 3.0
"""Margins make updates of norm 2 to 3; up to 1e-3 the noise that a larger clip brings costs less
than clipping them."""


def cohort_of_128(server_learning_rate: float) -> dict[str, Any]:
    """The cohort and settings that did best."""
    return {
        "users_per_client": 128,
        "clients_per_round": 1,
        "settings": {
            "training.local.head_learning_rate_scale": 1.0,
            "training.local.max_examples_per_client": 4096,
            "training.server.learning_rate": server_learning_rate,
            "mechanism.rounds": ROUNDS,
        },
    }


def _try(label: str, method: Method = "fedemb", **arguments: Any) -> Row:
    return Row(**{"label": label, "method": method, "noise": 3e-3} | arguments)


def _long(method: Method, noise: float, rate: float, more: dict[str, Any] | None = None) -> Row:
    label, cohort = f"128 users, head x1, 90 rounds, server {rate}", cohort_of_128(rate)
    settings = cohort["settings"] | (more or {})
    return _try(label, method, **{**cohort, "noise": noise, "settings": settings})


def selection_rows() -> list[Row]:
    """What the recipes were chosen from, on validation people."""
    rate, server = "training.local.client_learning_rate", "training.server.learning_rate"
    head, rounds = "training.local.head_learning_rate_scale", "mechanism.rounds"
    large: dict[str, Any] = {"users_per_client": 128, "clients_per_round": 1}
    return [
        Row(label="20 epochs", method="public_only"),
        Row(label="15 epochs", method="centralized"),
        _try("32 users, 4 clients"),
        _try("128 users, 1 client", **large),
        _try("128 users, server .1", **large, settings={server: 0.1}),
        _try("128 users, server .3", **large, settings={server: 0.3}),
        _try("server .1", "fedavg", noise=1e-2, settings={server: 0.1}),
        _try("32 users, server .1", settings={server: 0.1}),
        _try("server .3", "fedavg", noise=1e-2, settings={server: 0.3}),
        _try("128 users", noise=1e-3, **large),
        _try("128 users, rate .02", noise=1e-3, **large, settings={rate: 0.02}),
        _try("128 users, head x1", noise=1e-3, **large, settings={head: 1.0}),
        _try(
            "128 users, head x1, server .3", noise=1e-3, **large, settings={head: 1.0, server: 0.3}
        ),
        _try(
            "128 users, head x1, server .3, 80 rounds",
            noise=1e-3,
            **large,
            settings={head: 1.0, server: 0.3, rounds: 80},
        ),
        _try("head x1, server .1", "fedavg", noise=1e-2, settings={head: 1.0, server: 0.1}),
        _try("32 users, 90 rounds", settings={rounds: 90}),
        _long("fedemb", 3e-3, 1.0),
        # FedAvg with FedEmb's cohort and rounds, and the server's rate under more noise.
        _long("fedavg", 3e-3, 1.0),
        _long("fedemb", 1e-2, 0.3),
        _long("fedavg", 1e-2, 0.3, BFLOAT16),
        _long("ftrl", 1e-2, 0.3, BFLOAT16),
        _long("fedemb", 1e-2, 0.1, BFLOAT16),
        *_against_centralized(),
    ]


def _against_centralized() -> list[Row]:
    """What could close the gap to centralized training: only a harder local task did."""
    local, server, clip = "training.local", "training.server", "mechanism.l2_norm_clip"

    def changed(
        label: str,
        settings: dict[str, Any],
        method: Method = "fedemb",
        noise: float = 1e-3,
        rate: float = 1.0,
    ) -> Row:
        return replace(_long(method, noise, rate, BFLOAT16 | settings), label=label)

    return [
        changed("as before", {}),
        changed("server without momentum", {f"{server}.momentum": 0.0}),
        changed("clip 3", {clip: 3.0}),
        changed("clip 3, server without momentum", {clip: 3.0, f"{server}.momentum": 0.0}),
        changed("1 local epoch", {f"{local}.epochs": 1}),
        replace(changed("256 users a round", {}), clients_per_round=2),
        changed("CosFace", COSFACE),
        changed("CosFace, clip 3", COSFACE | {clip: CLIP_OF_LITTLE_NOISE}),
        changed("CosFace", COSFACE, noise=3e-3),
        changed("CosFace, server .1", COSFACE, noise=1e-2, rate=0.1),
        changed("CosFace, clip 3", COSFACE | {clip: CLIP_OF_LITTLE_NOISE}, "fedavg"),
        changed("CosFace, server .1", COSFACE, "fedavg", noise=1e-2, rate=0.1),
        Row(label="CosFace", method="centralized", settings=COSFACE),
    ]


def recipe(method: Method, noise: float) -> dict[str, Any]:
    """What selection chose: a cohort and settings for a method at a noise.

    CosFace did best everywhere, in centralized training too. FedAvg was best with FedEmb's own
    cohort, little noise allows a larger clip, and much noise wants a slow server. Rounds are those
    of all methods, since equal noise has an equal price only over equal rounds; local training is
    in bfloat16, to save time.
    """
    if method == "centralized":
        return {"settings": COSFACE}
    if method not in IN_ROUNDS:
        return {}
    much = 0.3 if method == "ftrl" else 0.1
    chosen = cohort_of_128(much if noise > NOISE_OF_ABLATIONS else 1.0)
    clip = CLIP_OF_LITTLE_NOISE if noise < NOISE_OF_ABLATIONS else 1.0
    settings = chosen["settings"] | BFLOAT16 | COSFACE | {"mechanism.l2_norm_clip": clip}
    return {**chosen, "settings": settings}


def final_rows() -> list[Row]:
    """The rows of the table, one seed after the other."""
    methods: list[tuple[Method, float]] = [
        ("untrained", 0.0),
        ("public_only", 0.0),
        ("centralized", 0.0),
        ("fedemb", 0.0),
        *((method, noise) for noise in NOISE for method in IN_ROUNDS),
    ]
    return [
        Row(stage="final", method=method, noise=noise, seed=seed, **recipe(method, noise))
        for seed in SEEDS
        for method, noise in methods
    ]


def rows_in_order() -> list[Row]:
    """All rows of the report in the order of what they teach, for a budget that ends early.

    One seed of the table; the comparison with FedAvg on all seeds; ablations; the rest.
    """

    def order(row: Row) -> int:
        if row.stage == "selection":
            return 2
        if row.seed == SEEDS[0]:
            return 0
        compared = row.method not in IN_ROUNDS or (row.method != "ftrl" and row.noise != NOISE[0])
        return 1 if compared else 3

    return sorted([*final_rows(), *ablation_rows()], key=order)


def ablation_rows() -> list[Row]:
    """One thing changed at a time, on validation people; the first row is the unchanged recipe."""
    chosen = recipe("fedemb", NOISE_OF_ABLATIONS)
    users, clients = chosen["users_per_client"], chosen["clients_per_round"]
    local, server = "training.local", "training.server"

    def changed(label: str, settings: dict[str, Any], **cohort: int) -> Row:
        merged = {**chosen["settings"], **settings}
        return _try(label, **{**chosen, **cohort, "settings": merged}, noise=NOISE_OF_ABLATIONS)

    def cohort(size: int) -> Row:
        count = max(1, round(users * clients / size))
        return changed(
            f"{size} users per virtual client, {count} a round",
            {},
            users_per_client=size,
            clients_per_round=count,
        )

    return [
        changed("unchanged", {}),
        *(cohort(size) for size in (8, 32, 64, 128) if size != users),
        changed("no public pretraining", {"pretraining.kind": "none"}),
        changed("self-supervised pretraining", {"pretraining.kind": "simclr"}),
        changed("random head", {f"{local}.head_init": "glorot"}),
        changed("head rate x25", {f"{local}.head_learning_rate_scale": 25.0}),
        changed("head rate x100", {f"{local}.head_learning_rate_scale": 100.0}),
        changed("head first, 8 steps", {f"{local}.reconstruction_steps": 8}),
        changed("dense layer only", {"model.trainable": "dense_only"}),
        changed("convolutions frozen", {"model.trainable": "conv_frozen"}),
        changed("cosine softmax, no margin", {f"{local}.loss": LOCAL["loss"]}),
        changed("plain softmax", {f"{local}.loss": {"kind": "softmax"}}),
        changed("ArcFace", {f"{local}.loss": {"kind": "arcface"}}),
        changed("batch-hard triplets", {f"{local}.loss": {"kind": "triplet"}}),
        changed("constant server rate", {f"{server}.schedule": "constant"}),
        changed("no averaging of weights", {f"{server}.ema_decay": 0.0}),
        changed("clip 0.3", {"mechanism.l2_norm_clip": 0.3}),
        changed("clip 3", {"mechanism.l2_norm_clip": 3.0}),
        changed("a new grouping each round", {"partition.groupings": ROUNDS}),
        changed("local training in float32", {"training.mixed_precision": False}),
    ]
