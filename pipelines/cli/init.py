"""`fedemb init`: from somebody's own photos to a configuration. The command line registers it."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from fedemb.errors import ConfigError, InputError
from fedemb.pipelines.cli.data import counted
from fedemb.pipelines.output import escaped, say

if TYPE_CHECKING:
    from fedemb.config import RunConfig, SourceConfig
    from fedemb.steps.partition_users.census import Census

_SIZES = (28, 32, 48, 64)
"""Sizes of the model to choose from: the largest that most photos have."""
_LEAST_CLIENTS = 8
"""Virtual clients of a round, at least, where there are as many."""
_LABELS_SHOWN = 50
_LIKELY = {"helpful": "likely", "uncertain": "possible", "hopeless": "not to be expected"}
_NOBODY = 1e-12
"""Share that is held out while all are counted: the run's key decides who is held out."""


@dataclass(frozen=True)
class _Recipe:
    """What is trained, and how: of the whole net, or of one layer on a frozen one."""

    users_per_client: int
    rounds: int
    sampling_probability: float
    model: dict[str, Any]


_WHOLE_NET = _Recipe(32, 30, 0.1, {"backbone": "resnet8"})
_FROZEN_NET = _Recipe(
    6, 8, 0.5, {"backbone": "imported", "embedding_dim": 64, "trainable": "projection"}
)
"""Of docs/how_to/public_backbone.md, for a thousand to ten thousand users."""


def init(
    data: Annotated[str, typer.Option(help="Photos: Parquet, CSV, TFRecord, a folder per user.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Configuration to write.")] = Path(
        "mine.yaml"
    ),
    users_lower_bound: Annotated[
        int | None,
        typer.Option(min=2, help="Users there will surely always be, a number you may publish."),
    ] = None,
    public: Annotated[
        str | None,
        typer.Option(
            help="Public photos to train a start on; a .keras file, which stays frozen below one "
            "layer that is trained; or none."
        ),
    ] = None,
    pixels: Annotated[
        str | None,
        typer.Option(
            help="What the .keras file was trained on: -1..1, 0..1, 0..255, imagenet or caffe; "
            "asked where the file does not tell."
        ),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(min=0.01, help="Epsilon of one run, for one user.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Classes that users share, a,b,c: a list you may publish, if it is short."
        ),
    ] = None,
    alike: Annotated[
        str | None,
        typer.Option(
            help="What the model learns to recognise: user (photos of one user are alike) or class "
            "(photos of one class are, whoever owns them)."
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="embedding, or classification: which of --classes a photo shows. A folder for "
            "each class then makes each image a unit of privacy of its own."
        ),
    ] = None,
    by_user: Annotated[bool, typer.Option("--by-user", help="The same as --alike user.")] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a column, e.g. --column user_id=owner; may be given often. user_id=none "
            "(a classifier's): nobody owns several images, and each is a unit of privacy."
        ),
    ] = None,
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="parquet, tfrecord, csv or image_folder; default: by the names of files.",
        ),
    ] = None,
    aspect_ratio: Annotated[
        str, typer.Option(help="squash (stretch to a square) or letterbox (fill up with grey).")
    ] = "squash",
) -> None:
    """Write a configuration for your photos.

    Asks for the three numbers that only you know, unless they are given. What is counted is private
    and is printed for you alone; no count goes into the file.
    """
    from fedemb.foundation.files import write_bytes
    from fedemb.pipelines.cli.init_classifier import as_classifier, source_of_classes
    from fedemb.pipelines.cli.planning.planned import calibrated
    from fedemb.pipelines.run.load_config import load_config, validate
    from fedemb.privacy.accounting.units import UNITS
    from fedemb.steps.partition_users.check import too_few_classes

    if output.exists():
        raise InputError(f"{output} exists; name another file with --output, or remove it")
    if alike not in (None, "user", "class"):
        raise ConfigError(f"--alike is {alike}, expected user or class")
    classify = _classifies(task, alike or ("user" if by_user else None))
    source = _source(data, column or [], format_, classify=classify)
    if by_user or alike == "user":
        unlabelled = source.columns.model_copy(update={"label": None})
        source = source.model_copy(update={"label_scope": "user", "columns": unlabelled})
    with counted("reading photos") as progress:
        census, size, channels = _look(source, aspect_ratio, progress)
    labelled, folders = source_of_classes(source) if classify else (source, [])
    unit = UNITS["image" if labelled.columns.user_id is None else "user"]
    _say(census, source, folders)
    bound = users_lower_bound or _asked(
        f"How many {unit.many} will there surely always be? (public; epsilon's delta rests on it)",
        "--users-lower-bound",
        int,
    )
    start = public or _asked(
        "Public photos or a .keras file to start from?", "--public", str, "none"
    )
    target = epsilon or _asked(f"Epsilon of one run, for one {unit.one}?", "--epsilon", float, 8.0)
    imported = _imported(start, pixels)
    if imported:
        size, channels = _images_of(start) or (size, channels)
    tree = _tree(source, census, size, channels, aspect_ratio, bound, start, target)
    tree["pretraining"] |= imported
    learns = _alike(tree, alike)
    if classify:
        named = classes or _asked("Which classes (a,b,c)? A list you may publish", "--classes", str)
        _check_classes(named, census)
        tree, classes = as_classifier(tree, labelled, named), None
        learns = f"tell {len(tree['model']['classes'])} classes apart. {unit.covered}"
    say(
        f"the model will see {size} x {size} pixels, {'colour' if channels > 1 else 'grey'}, and "
        + learns
    )
    few = too_few_classes(validate(tree), census.classes)
    if few and classes is None and sys.stdin.isatty():
        classes = _asked(f"{few} Which are they (a,b,c)?", "--classes", str, "")
    if classes:
        held_out = [name.strip() for name in classes.split(",")]
        tree["partition"]["evaluation"]["classes"] = held_out
    planned = calibrated(validate(tree), target).mechanism.model_dump(mode="json")
    tree["mechanism"]["noise_multiplier"] = planned["noise_multiplier"]
    write_bytes(output, _text(tree, output).encode())
    say("", f"wrote {output}")
    for line in _prospects(load_config(output)):
        say(line)
    if few and not classes:
        say(f"warning: {few}")
    _close(output, bound, _photos(census) if unit.one == "image" else _users(census), unit.many)


def _check_classes(named: str, census: Census) -> None:
    """Refuses a list of classes of which no photo has one."""
    wanted = [name.strip() for name in named.split(",")]
    if not census.labels or set(wanted) & set(census.labels):
        return
    shown = ",".join(sorted(census.labels)[:_LABELS_SHOWN])
    spelled = {label.casefold(): label for label in census.labels}
    other = [spelled[name.casefold()] for name in wanted if name.casefold() in spelled]
    hint = f"--classes {','.join(other)}" if other else "--classes with names from that list"
    raise ConfigError(
        f"none of the classes {', '.join(wanted)} is in the labels of the photos, which are "
        f"{shown}; pass {hint}, if you may publish them"
    )


def _alike(tree: dict[str, Any], alike: str | None) -> str:
    """What an embedding learns, in words."""
    by_class = tree["data"]["source"]["label_scope"] == "global"
    if alike == "class" and not by_class:
        raise ConfigError(
            "--alike is class, and no column names classes that users share; name it with --column "
            "label=NAME, or leave --alike out"
        )
    learned = "class (--alike user: of one user)" if by_class else "user"
    return f"learn that photos of one {learned} are alike"


def _close(output: Path, bound: int, usable: int, units: str) -> None:
    if usable < bound:
        say(
            f"warning: {bound:,} {units} are promised and {usable:,} can be used here; delta "
            "and noise rest on the promise, so lower it unless these are some of them"
        )
    say(
        f"next: fedemb check-data -c {output}; fedemb plan --config {output} --explain; "
        f"fedemb run --config {output} --policy FOLDER. That is a simulation, which costs nothing; "
        "for a model set purpose: release. The first run fixes the policy's terms for life"
    )


def _classifies(task: str | None, alike: str | None) -> bool:
    if task not in (None, "embedding", "classification"):
        raise ConfigError(f"--task is {task}, expected embedding or classification")
    if task == "classification" and alike:
        raise ConfigError(
            f"--alike {alike} says what an embedding learns, and --task is classification; leave "
            "one of them out"
        )
    return task == "classification"


def _source(data: str, columns: list[str], kind: str | None, *, classify: bool) -> SourceConfig:
    from fedemb.config.data import ENDINGS, Columns
    from fedemb.data.columns import guess_source

    named: dict[str, str] = {}
    for item in columns:
        what, _, name = item.partition("=")
        if what not in Columns.model_fields or not name:
            raise ConfigError(
                f"--column is {item}, expected WHAT=NAME, where WHAT is one of "
                f"{', '.join(Columns.model_fields)}"
            )
        named[what] = name
    uri = data if "://" in data else str(Path(data).resolve())
    if kind not in (None, "image_folder", *ENDINGS):
        known = ", ".join((*ENDINGS, "image_folder"))
        raise ConfigError(f"--format is {kind}, expected one of {known}")
    source = guess_source(uri, named, kind)
    if source.columns.user_id is None and not classify:
        raise ConfigError(
            "--column is user_id=none, and an embedding is learned from images of one owner; say "
            "--task classification, or name the column of owners"
        )
    return source


def _asked(question: str, flag: str, kind: type, default: Any = None) -> Any:
    if not sys.stdin.isatty():
        if default is not None:
            return default
        raise ConfigError(
            f"{flag} is missing, and standard input is no terminal to ask for it; give it"
        )
    return typer.prompt(escaped(question), type=kind, default=default)


def _look(source: SourceConfig, aspect_ratio: str, progress: Any) -> tuple[Census, int, int]:
    """Counts the photos, and finds the size and colours that suit them."""
    from fedemb.pipelines.run.load_config import validate
    from fedemb.privacy.mechanisms.registry import PoissonGaussian
    from fedemb.steps.partition_users.census import take_census
    from fedemb.steps.partition_users.check import BAD, inexact_ids, looked_for

    config = validate(
        {
            "purpose": "simulation",
            "data": {"source": source.model_dump(mode="json")},
            "partition": {"virtual_clients": 1, "evaluation": {"by": "hash", "fraction": _NOBODY}},
            "model": {"image_size": _SIZES[-1], "channels": 3, "aspect_ratio": aspect_ratio},
            "mechanism": {
                "kind": PoissonGaussian.kind_name(),
                "rounds": 1,
                "sampling_probability": 1.0,
                "units_per_round": 1,
                "noise_multiplier": 1.0,
            },
            "policy": {
                "users_lower_bound": 2,
                "delta": 0.1,
                "epsilon_cap": 1.0,
                "unit": "image" if source.columns.user_id is None else "user",
            },
        }
    )
    census = take_census(config, progress)
    if refused := inexact_ids(census):
        raise InputError(" ".join(refused))
    if not census.samples:
        found = [
            f"{census.counts[name]:,}: {text}" for name, text in BAD.items() if census.counts[name]
        ]
        why = "; ".join(found) or f"{census.counts['rows']:,} records"
        raise InputError(
            f"no photo of {source.uri} can be used ({why}); repair them, or name the columns with "
            "--column WHAT=NAME",
            *looked_for(census, source),
        )
    fitting = [size for size in _SIZES if size <= census.median_side]
    return census, max(fitting, default=_SIZES[0]), 3 if census.colour else 1


def _imported(start: str, pixels: str | None) -> dict[str, Any]:
    if start.endswith(".keras"):
        from fedemb.config import PretrainingConfig
        from fedemb.models.imported import with_card

        told = {"import_pixels": _pixels_of(start, pixels)}
        given = PretrainingConfig.model_validate({"kind": "import", "import_path": start, **told})
        found = with_card(Path(start), given)
        fields = {"licence", "provenance"}
        return told | found.model_dump(mode="json", include=fields, exclude_defaults=True)
    if pixels:
        raise ConfigError(f"--pixels is of a .keras file, and --public is {start}; leave it out")
    return {}


def _images_of(start: str) -> tuple[int, int] | None:
    from fedemb.models.imported import check_import, image_shape

    check_import(Path(start), _FROZEN_NET.model["trainable"])
    return image_shape(Path(start))


def _pixels_of(start: str, said: str | None) -> str:
    """What the file was trained on: pixels read otherwise would be other photos to it."""
    from fedemb.config import PretrainingConfig
    from fedemb.models.imported import known_pixels

    known, name = known_pixels(Path(start)), Path(start).name
    if said is None and known:
        say(f"{name} sees pixels as {known[0]}, told by {known[1]} (else give --pixels)")
        return known[0]
    kinds = get_args(PretrainingConfig.model_fields["import_pixels"].annotation)
    question = f"What pixels was {name} trained on ({', '.join(kinds)})? It does not tell"
    given = said or _asked(question, "--pixels", str)
    if given not in kinds:
        raise ConfigError(f"--pixels is {given}; give one of {', '.join(kinds)}")
    if known and known[0] != given:
        say(f"warning: --pixels is {given}, while {known[1]} tells of {known[0]}")
    return given


def _say(census: Census, source: SourceConfig, classes: list[str]) -> None:
    from fedemb.pipelines.cli.init_classifier import listed
    from fedemb.privacy.accounting.units import count_of

    users, sizes = _users(census), census.sizes
    if classes or source.columns.user_id is None:
        used = f"{_photos(census):,} of them can be used (private figures, for you)"
        found = listed(classes) if classes else f"{count_of(census.classes, 'label')}"
        say(f"{count_of(census.counts['rows'], 'photo')}; {used}", found)
        _say_bad(census)
        return
    say(
        f"{count_of(census.counts['rows'], 'photo')}; {count_of(users, 'user')} can be used, "
        f"{sizes.mean():.3g} photos each; {census.classes:,} classes, {census.common_classes:,} of "
        "them of more than one user (private figures, for you)"
    )
    if users == 1:
        say(
            "warning: all photos are of one user; a folder holds a folder for each, and --column "
            "user_id=NAME names the column of a table"
        )
    elif source.file_format == "image_folder":
        say(
            "each folder is taken for one user; if yours are classes, --task classification "
            "--classes a,b,c writes a classifier whose unit of privacy is one image; if splits, "
            "name a table of the photos and their owners"
        )
    _say_bad(census)


def _say_bad(census: Census) -> None:
    from fedemb.steps.partition_users.check import BAD, LEFT_OUT, folded_ids

    for line in folded_ids(census):
        say(f"  {line}")
    for name, text in (BAD | {"side_file": LEFT_OUT["side_file"]}).items():
        if census.counts[name]:
            say(f"  {census.counts[name]:,} cannot be used: {text}")


def _photos(census: Census) -> int:
    """Images that can be used, were each a unit of its own."""
    from fedemb.steps.partition_users.check import BAD, LEFT_OUT

    lost = [name for name in (*BAD, *LEFT_OUT) if name != "dropped_over_cap"]
    return census.counts["rows"] - sum(census.counts[name] for name in lost)


def _users(census: Census) -> int:
    return len(census.sizes) + len(census.held_out_sizes)


def _tree(
    source: SourceConfig,
    census: Census,
    size: int,
    channels: int,
    aspect_ratio: str,
    bound: int,
    start: str,
    target: float,
) -> dict[str, Any]:
    from fedemb.privacy.mechanisms.registry import GroupPoissonGaussian

    recipe = _FROZEN_NET if start.endswith(".keras") else _WHOLE_NET
    clients = max(1, round(0.9 * bound / recipe.users_per_client))
    probability = max(recipe.sampling_probability, _LEAST_CLIENTS / clients)
    shared = source.columns.label is not None and census.common_classes > 0
    described = source.model_dump(mode="json", exclude_defaults=True)
    described["label_scope"] = "global" if shared else "user"
    return {
        "purpose": "simulation",
        "data": {"source": described},
        "partition": {"virtual_clients": clients, "evaluation": {"by": "hash", "fraction": 0.1}},
        "model": {
            **recipe.model,
            "image_size": size,
            "channels": channels,
            "aspect_ratio": aspect_ratio,
        },
        "pretraining": _public_start(start),
        "mechanism": {
            "kind": GroupPoissonGaussian.kind_name(),
            "rounds": recipe.rounds,
            "sampling_probability": round(min(1.0, probability), 3),
            "noise_multiplier": 1.0,
        },
        "training": {"local": {"head_init": "prototypes", "head_learning_rate_scale": 12.0}},
        "policy": {
            "policy_id": _policy_id(Path(source.uri).stem),
            "users_lower_bound": bound,
            "delta": _rounded_down(min(1e-5, bound**-1.1)),
            "composition": "planned",
            "epsilon_cap": target,
        },
    }


def _policy_id(stem: str) -> str:
    """What a policy is called after a file or folder; what no policy may be called gets a word."""
    from fedemb.config.policy import PRIVATE_FOLDERS

    name = re.sub(r"[^a-z0-9._-]+", "-", stem.lower())[:50].strip("._-") or "mine"
    return f"{name}-photos" if name in PRIVATE_FOLDERS else name


def _rounded_down(number: float) -> float:
    """To one digit, and never up: a delta above the customary one would need a waiver."""
    power = 10.0 ** math.floor(math.log10(number))
    return float(f"{math.floor(number / power) * power:.0e}")


def _public_start(start: str) -> dict[str, Any]:
    from fedemb.data.columns import guess_source

    if start == "none":
        return {"kind": "none"}
    uri = start if "://" in start else str(Path(start).resolve())
    if "://" not in start and not Path(start).exists():
        raise InputError(f"there is nothing at {uri}; --public names photos, a .keras file or none")
    if start.endswith(".keras"):
        return {"kind": "import", "import_path": uri}
    source = guess_source(uri, {})
    described = source.model_dump(mode="json", exclude_defaults=True)
    return {
        "kind": "supervised",
        "source": described,
        "loss": {"kind": "cosface"},
        "doublings": 2,
    }


def _prospects(config: RunConfig) -> list[str]:
    """What can be had, in the study's terms."""
    from fedemb.pipelines.cli.planning.plan_text import PROTECTS_UP_TO
    from fedemb.privacy.mechanisms.registry import plan_mechanism
    from fedemb.reports.mechanism_text import participants
    from fedemb.steps.plan_privacy.plan import warnings
    from fedemb.steps.plan_privacy.prospects import noise_on_mean, prospects

    plan = plan_mechanism(config)
    found = prospects(config, plan)
    lines = [
        f"{participants(plan)}; the noise on the mean is {noise_on_mean(plan):.2g} of the clip"
        + ("" if found is None else f"; a gain is {_LIKELY[found.region]}")
    ]
    lines += [f"warning: {text}" for text in warnings(config).values()]
    epsilon = config.policy.epsilon_cap
    if epsilon > PROTECTS_UP_TO:
        lines.append(
            f"warning: epsilon {epsilon:g} is the cap of the policy for its life, and protects "
            "nobody; 1 to 8 is usual"
        )
    if "noise_beyond_the_study" in warnings(config):
        small = config.model.trainable == "projection"
        advice = (
            "" if small else "train one layer on a strong public net (--public FILE.keras), or "
        )
        lines.append(
            f"with so few users: {advice}try it on public photos before you count on anything "
            "(docs/how_to/choose_epsilon.md)"
        )
    return lines


_COMMENTS = {
    "purpose": "`release` once `tuning` says how these numbers were chosen; until then nothing is "
    "released. The first run with a --policy folder fixes the policy below for its life, a "
    "simulation too: give what you only want to look at a folder of its own. A simulation of "
    "private photos is named in later reports of its policy, and nothing covers what it told you",
    "partition": "virtual_clients: a share of the users you promise, so a public number",
    "pretraining": "doublings: as long as unseen public classes gain by it, up to four times the "
    "epochs; licence and provenance are yours to state, e.g. licence: cc-by-4.0; of a file "
    "import_pixels is what it was trained on",
    "mechanism": "noise_multiplier: the least for policy.epsilon_cap; `fedemb plan "
    "--target-epsilon E --config FILE --write FILE` changes it",
    "policy": "users_lower_bound: what you promise, best near the truth, for delta is chosen by "
    "it. Other names of a policy are other budgets: on the same users epsilons add up",
}


def _text(tree: dict[str, Any], output: Path) -> str:
    import yaml

    parts = ["# Written by `fedemb init`; `fedemb config describe` says what each setting means.\n"]
    for section, value in tree.items():
        if section in _COMMENTS and (section, tree.get("task")) != ("partition", "classification"):
            parts.append(f"# {_COMMENTS[section].replace('FILE', output.name)}\n")
        parts.append(yaml.safe_dump({section: value}, sort_keys=False))
    return "".join(parts)
