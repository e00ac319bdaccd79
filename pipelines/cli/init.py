"""`fedemb init`: a configuration from photos and a few answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.data import counted
from fedemb.pipelines.cli.init_options import InitOptions
from fedemb.pipelines.cli.options import grouped
from fedemb.pipelines.output import say

if TYPE_CHECKING:
    from fedemb.pipelines.cli.init_photos import Photos
    from fedemb.pipelines.cli.init_settings import Goal, Recipe


@grouped
def init(*, options: InitOptions) -> None:
    """Write a configuration for your photos.

    Counts of your photos are private: they are printed and not written to the file.

    Example: fedemb init --data photos/ --users-lower-bound 1000 -o mine.yaml
    """
    from fedemb.pipelines.cli.init_photos import describe, survey
    from fedemb.pipelines.cli.init_settings import (
        Goal,
        as_text,
        backbone_of,
        finished,
        forecast_text,
    )
    from fedemb.pipelines.run.load_config import load_config

    output, classify = options.output, options.classify()
    if output.exists():
        raise InputError(f"{output} exists. Remove it, or pass another file by --output.")
    with counted("reading photos") as progress:
        photos = survey(options, classify=classify, progress=progress)
    describe(photos)
    bound = options.users_lower_bound
    start = backbone_of(options.public, options.public_photos, options.pixels)
    goal = Goal(photos=photos, start=start, users_lower_bound=bound, epsilon=options.epsilon)
    settings = finished(*(_classifier if classify else _embedding)(goal, options))
    write_bytes(output, as_text(settings, output).encode())
    say("", f"wrote {output}", *forecast_text(load_config(output)))
    _next_steps(output, bound, photos)


def _classifier(goal: Goal, options: InitOptions) -> tuple[Goal, Recipe]:
    from fedemb.pipelines.cli.init_photos import check_classes
    from fedemb.pipelines.cli.init_settings import classifier_recipe
    from fedemb.pipelines.run.load_config import validate

    if not options.classes:
        raise ConfigError("A classifier has a public list of classes. Pass --classes a,b,c.")
    goal = replace(goal, classes=_names(options.classes))
    check_classes(goal.classes, goal.photos.census)
    recipe = classifier_recipe(goal)
    model = validate(goal.settings(recipe)).model
    say(
        f"the model sees {_images(model.image_size, model.channels)} and learns to distinguish "
        f"{len(goal.classes)} classes. {goal.photos.unit.covered}",
        f"trained: {model.trainable}, on backbone {model.backbone}",
    )
    return goal, recipe


def _embedding(goal: Goal, options: InitOptions) -> tuple[Goal, Recipe]:
    from fedemb.partition.check import too_few_classes
    from fedemb.pipelines.cli.init_settings import embedding_recipe, shares_classes
    from fedemb.pipelines.run.load_config import validate

    photos, by_class = goal.photos, shares_classes(goal.photos)
    if options.alike == "class" and not by_class:
        raise ConfigError(
            "--alike is class, and users share no class. Pass the column of classes by --column "
            "label=NAME, or drop --alike."
        )
    recipe = embedding_recipe(goal)
    config = validate(goal.settings(recipe))
    shared = "class (--alike user: one user)" if by_class else "user"
    images = _images(config.model.image_size, config.model.channels)
    say(f"the model sees {images} and learns that photos of one {shared} are alike")
    named = options.classes
    if not named and (few := too_few_classes(config, photos.census.classes)):
        say(f"warning: {few}")
    return (replace(goal, classes=_names(named)) if named else goal), recipe


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",")]


def _images(size: int, channels: int) -> str:
    return f"{size} x {size} pixels, {'colour' if channels > 1 else 'grey'},"


def _next_steps(output: Path, bound: int, photos: Photos) -> None:
    usable, units = photos.usable_units, photos.unit.many
    if usable < bound:
        say(
            f"warning: the public lower bound is {bound:,} {units}, and {usable:,} are usable here."
            " Lower the bound, unless these photos are a part of the data."
        )
    say(
        "next:",
        f"  fedemb check-data --config {output}",
        f"  fedemb plan --config {output}",
        f"  fedemb run --config {output} --policy FOLDER",
        "The run is a simulation: it charges no budget and releases nothing. For a release with "
        "these settings, unchanged, add --set purpose=release --set tuning.data=public --set "
        "'tuning.method=defaults of init'; otherwise see `fedemb config tuning`.",
        "The first run with a policy folder fixes the policy. Use a separate folder for tests.",
    )
