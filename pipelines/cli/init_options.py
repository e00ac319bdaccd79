"""Options of `fedemb init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedemb.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Options of `fedemb init`."""

    data: Annotated[
        str, typer.Option(help="Photos: Parquet, CSV, TFRecord, or one folder per user.")
    ]
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN=NAME",
            help="Name of a column, such as user_id=owner; repeatable. user_id=none: each image of "
            "a classifier is its own unit of privacy.",
        ),
    ] = None
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="Format: parquet, tfrecord, csv or image_folder; default: by name."
        ),
    ] = None
    image_root: Annotated[
        str | None,
        typer.Option(help="CSV only: folder of its images; default: the one that has the first."),
    ] = None
    aspect_ratio: Annotated[
        str, typer.Option(help="squash (stretch to a square) or letterbox (pad with grey).")
    ] = "squash"
    output: Annotated[Path, typer.Option("--output", "-o", help="Configuration to write.")] = Path(
        "mine.yaml"
    )
    users_lower_bound: Annotated[
        int, typer.Option(min=2, help="Public lower bound on the number of users, for delta.")
    ]
    epsilon: Annotated[float, typer.Option(min=0.01, help="Epsilon of one run for one user.")] = 8.0
    public: Annotated[
        str,
        typer.Option(
            help="Public photos to pretrain on, a .keras file to train one layer on, or none."
        ),
    ] = "none"
    public_photos: Annotated[
        str | None,
        typer.Option(
            help="Public photos that standardise the features of the .keras file, 1,000 or more."
        ),
    ] = None
    pixels: Annotated[
        str | None,
        typer.Option(
            help="Pixel format of the .keras file: -1..1, 0..1, 0..255, imagenet or caffe; "
            "default: read from the file."
        ),
    ] = None
    task: Annotated[str | None, typer.Option(help="embedding (default) or classification.")] = None
    classes: Annotated[
        str | None,
        typer.Option(help="Public list of the classes that users share, such as cat,dog."),
    ] = None
    alike: Annotated[
        str | None,
        typer.Option(help="Similar photos share a user or a class; default: class if users do."),
    ] = None

    def classify(self) -> bool:
        """Returns whether to train a classifier.

        Raises:
          ConfigError: an option is unknown, or two exclude each other.
        """
        if self.alike not in (None, "user", "class"):
            raise ConfigError(f"--alike is {self.alike}. Pass user or class.")
        if self.task not in (None, "embedding", "classification"):
            raise ConfigError(f"--task is {self.task}. Pass embedding or classification.")
        if self.task == "classification" and self.alike:
            raise ConfigError(
                f"--alike {self.alike} is for embeddings, and --task is classification. "
                "Drop one of the two options."
            )
        return self.task == "classification"
