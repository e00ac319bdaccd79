"""`fedemb init`: writes a configuration for your own photos."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.data import counted
from fedemb.pipelines.cli.init.options import (
    BackboneOptions,
    BudgetOptions,
    GoalOptions,
    PhotoOptions,
)
from fedemb.pipelines.cli.option_groups import grouped
from fedemb.pipelines.output import escaped, say

if TYPE_CHECKING:
    from fedemb.pipelines.cli.init.backbone import Backbone
    from fedemb.pipelines.cli.init.photos import Photos
    from fedemb.pipelines.cli.init.settings import Promise, Settings

Answer = TypeVar("Answer", int, float, str)


@grouped
def init(
    *,
    photos: PhotoOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="Configuration to write.")] = Path(
        "mine.yaml"
    ),
    budget: BudgetOptions,
    backbone: BackboneOptions,
    goal: GoalOptions,
) -> None:
    """Write a configuration for your photos.

    Asks for the public numbers that no option sets. Counts of your photos are private: they are
    printed and not written to the file.

    Example: fedemb init --data photos/ --users-lower-bound 1000 -o mine.yaml
    """
    from fedemb.pipelines.cli.init.classifier import recipe_of, with_head_rates, with_solved_head
    from fedemb.pipelines.cli.init.photos import describe, source_of, survey
    from fedemb.pipelines.cli.init.settings import Promise, as_text, outlook
    from fedemb.pipelines.cli.planning.planned import calibrated
    from fedemb.pipelines.run.load_config import load_config, validate

    if output.exists():
        raise InputError(f"{output} exists. Remove it, or pass another file by --output.")
    classify = goal.classify()
    source = source_of(photos, classify=classify, by_user=goal.similar_by == "user")
    with counted("reading photos") as progress:
        found = survey(source, photos.aspect_ratio, classify=classify, progress=progress)
    describe(found)
    unit = found.unit
    bound = budget.users_lower_bound or asked(
        f"Public lower bound on the number of {unit.many} (delta depends on it)?",
        "--users-lower-bound",
        int,
    )
    start = _backbone(backbone)
    epsilon = budget.epsilon or asked(
        f"Epsilon of one run for one {unit.one}?", "--epsilon", float, 8.0
    )
    promise = Promise(users_lower_bound=bound, epsilon=epsilon)
    settings = (_classifier if classify else _embedding)(found, start, promise, goal)
    config = calibrated(validate(settings), epsilon)
    if classify:
        settings = with_solved_head(settings, config, start)
        config = calibrated(validate(settings), epsilon)
    mechanism = config.mechanism.model_dump(mode="json")
    settings["mechanism"]["noise_multiplier"] = mechanism["noise_multiplier"]
    for name, value in with_head_rates(settings, config, recipe_of(start, bound)).items():
        say(f"{name} for this noise: {value:g}")
    write_bytes(output, as_text(settings, output).encode())
    say("", f"wrote {output}", *outlook(load_config(output)))
    _next_steps(output, bound, found)


def asked(question: str, flag: str, kind: type[Answer], default: Answer | None = None) -> Answer:
    """Returns the answer to a question; the default if standard input is not a terminal.

    Raises:
      ConfigError: neither a default nor a terminal exists.
    """
    if sys.stdin.isatty():
        return typer.prompt(escaped(question), type=kind, default=default)
    if default is None:
        raise ConfigError(f"{flag} is missing, and standard input is not a terminal. Pass {flag}.")
    return default


def _backbone(options: BackboneOptions) -> Backbone:
    from fedemb.pipelines.cli.init.backbone import backbone_of

    start = options.public or asked(
        "Public photos or a .keras file to start from?", "--public", str, "none"
    )
    photos = options.public_photos
    return backbone_of(
        start, photos, options.pixels, lambda question: asked(question, "--pixels", str)
    )


def _classifier(photos: Photos, start: Backbone, promise: Promise, goal: GoalOptions) -> Settings:
    from fedemb.pipelines.cli.init.classifier import check_classes, classifier_settings
    from fedemb.pipelines.run.load_config import validate

    named = goal.classes or asked("Public list of classes (a,b,c)?", "--classes", str)
    classes = [name.strip() for name in named.split(",")]
    check_classes(classes, photos.census)
    settings = classifier_settings(photos, start, promise, classes)
    learns = f"learns to distinguish {len(classes)} classes"
    model = validate(settings).model
    size, colour = model.image_size, "colour" if model.channels > 1 else "grey"
    say(f"the model sees {size} x {size} pixels, {colour}, and {learns}. {photos.unit.covered}")
    say(f"trained: {model.trainable}, on backbone {model.backbone}")
    return settings


def _embedding(photos: Photos, start: Backbone, promise: Promise, goal: GoalOptions) -> Settings:
    from fedemb.pipelines.cli.init.settings import embedding_settings, recipe_of, shares_classes
    from fedemb.pipelines.run.load_config import validate
    from fedemb.steps.partition_users.check import too_few_classes

    by_class = shares_classes(photos)
    if goal.alike == "class" and not by_class:
        raise ConfigError(
            "--alike is class, and users share no class. Pass the column of classes by --column "
            "label=NAME, or drop --alike."
        )
    shared = "class (--alike user: one user)" if by_class else "user"
    say(f"the model sees {start.images(photos)} and learns that photos of one {shared} are alike")
    recipe = recipe_of(photos, start, promise)
    settings = embedding_settings(photos, start, promise, recipe)
    few = too_few_classes(validate(settings), photos.census.classes)
    named = goal.classes
    if few and named is None and sys.stdin.isatty():
        named = asked(f"{few} Which are they (a,b,c)?", "--classes", str, "")
    if named:
        classes = [name.strip() for name in named.split(",")]
        return embedding_settings(photos, start, promise, recipe, held_out_classes=classes)
    if few:
        say(f"warning: {few}")
    return settings


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
        "The run is a simulation: it charges no budget and releases nothing. For a release, set "
        "purpose: release and tuning.",
        "The first run with a policy folder fixes the policy. Use a separate folder for tests.",
    )
