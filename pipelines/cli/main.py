"""The command line. Imports nothing heavy at the top: `fedemb --help` answers within a second."""

from __future__ import annotations

import codecs
import errno
import gc
import locale
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Protocol

import typer
from typer.core import TyperGroup
from typing_extensions import override

from fedemb.errors import FedEmbError, InputError
from fedemb.foundation.canonical_json import file_digest
from fedemb.foundation.environment import missing_extra
from fedemb.pipelines.cli.approve import approve
from fedemb.pipelines.cli.backbone import backbone_app
from fedemb.pipelines.cli.cluster import doctor, schedule, submit
from fedemb.pipelines.cli.data import check_data, make_data
from fedemb.pipelines.cli.embed import embed
from fedemb.pipelines.cli.init import init
from fedemb.pipelines.cli.ledger import app as ledger_app
from fedemb.pipelines.cli.options import ConfigOption, SetOption
from fedemb.pipelines.cli.plan import plan
from fedemb.pipelines.cli.review import register, show_runs, verify_release
from fedemb.pipelines.cli.run import run
from fedemb.pipelines.output import say, say_block, say_json

SECTIONS: dict[str, tuple[str, ...]] = {
    "Prepare": ("init", "check-data", "make-data", "backbone", "config"),
    "Plan and run": ("plan", "run", "runs", "ledger"),
    "Review and release": ("approve", "verify", "register"),
    "Use a model": ("embed",),
    "Operate": ("compile", "submit", "schedule", "doctor"),
}
"""Title -> commands, in the order of the help. A test compares them with the commands."""


class Formatter(Protocol):
    """Formatter of help texts; its own type is private to Typer."""

    def section(self, name: str) -> AbstractContextManager[None]:
        """Indents what is written inside below a title."""
        ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Writes terms and their descriptions."""
        ...


class SectionedGroup(TyperGroup):
    """Group of commands whose help lists them by section."""

    @override
    def format_commands(self, ctx: object, formatter: Formatter) -> None:
        """Writes one list of commands for each section."""
        width = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(limit=100))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="fedemb",
    cls=SectionedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(init)
app.command()(run)
app.command(name="runs")(show_runs)
app.command()(check_data)
app.command()(make_data)
app.add_typer(backbone_app, name="backbone")
app.command()(plan)
app.command()(submit)
app.command()(doctor)
app.command()(schedule)
app.add_typer(ledger_app, name="ledger")
app.command()(approve)
app.command(name="verify")(verify_release)
app.command()(register)
app.command()(embed)


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train image embeddings and classifiers with differential privacy."""
    if version:
        from importlib.metadata import version as installed

        say(f"fedemb {installed('fedemb')}")
        raise typer.Exit


@app.command(name="compile")
def compile_(
    output: Annotated[Path, typer.Option("--output", "-o", help="YAML file to write.")],
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROFILE",
            help="cpu, gpu, tpu or a file; each is laid over the ones before. [cpu]",
        ),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REF@sha256:...", help="Image; NAME is light, cpu or trainer; repeatable."
        ),
    ] = None,
) -> None:
    """Compile the pipeline for a cluster and check the result.

    Example: fedemb compile --profile gpu -o fedemb.yaml --image
    light=REF@sha256:... --image cpu=REF@sha256:... --image trainer=REF@sha256:...
    """
    from fedemb.pipelines.cluster.compile import compile_pipeline, parse_images

    compile_pipeline(output, profile=profile or ["cpu"], images=parse_images(image or []))
    say(f"wrote {output}, sha256 {file_digest(output)}")


@app.command(name="config")
def config_(
    section: Annotated[
        str | None, typer.Argument(help="Section to explain, such as mechanism; all; or presets.")
    ] = None,
    config: ConfigOption = "quickstart",
    set_: SetOption = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON schema.")] = False,
) -> None:
    """Print a configuration with all defaults filled in, as YAML, or explain the settings.

    --config takes a schedule too: its configuration is printed with its overrides.

    Example: fedemb config -c quickstart --set mechanism.rounds=20 > mine.yaml
    """
    import yaml

    from fedemb.config import RunConfig
    from fedemb.pipelines.cli.config_text import describe
    from fedemb.pipelines.cluster.schedule import is_schedule, load_schedule
    from fedemb.pipelines.run.load_config import load_config, overridden, preset_lines

    if json_:
        say_json(RunConfig.model_json_schema(), sort_keys=True)
    elif section == "presets":
        say(*preset_lines())
    elif section is not None:
        say(*describe(None if section == "all" else section))
    else:
        file = Path(config)
        scheduled = load_schedule(file).config if is_schedule(file) else None
        loaded = overridden(scheduled, set_ or []) if scheduled else load_config(config, set_ or [])
        say_block(yaml.safe_dump(loaded.model_dump(mode="json"), sort_keys=False))


_WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path on the command line that no command can use."""
_SHOWN = 200


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Errors meant for the user become one sentence and their exit code."""
    try:
        yield
    except FedEmbError as error:
        say(f"{type(error).__name__}: {error.message}", *error.details, err=True)
        sys.exit(error.exit_code)
    except Exception as error:
        if isinstance(error, ImportError) and (extra := missing_extra(error)):
            say(f"{type(extra).__name__}: {extra.message}", err=True)
            sys.exit(extra.exit_code)
        if isinstance(error, OSError) and error.errno in _WRONG_PATH:
            where = str(error.filename)
            shown = where if len(where) < _SHOWN else f"{where[:_SHOWN]}..."
            say(f"InputError: {shown}: {error.strerror}; name another path", err=True)
            sys.exit(InputError.exit_code)
        say(
            "this is a bug in fedemb: please report the lines below, after you have taken out what "
            "is private",
            "",
            err=True,
        )
        say_block(traceback.format_exc(), err=True)
        sys.exit(1)


def _restart_in_utf8() -> None:
    """Restarts in Python's UTF-8 mode where the locale reads names and files in another encoding.

    Otherwise letters of file names are lost, and two users may get one name. Output keeps the
    encoding of the terminal.
    """
    encodings = (sys.getfilesystemencoding(), locale.getpreferredencoding(False))
    if all(codecs.lookup(name).name == "utf-8" for name in encodings):
        return
    if os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    if arguments is None:
        _restart_in_utf8()
    # Imports and large ledgers are objects that stay: collecting garbage among them again and
    # again takes a tenth of a short command.
    gc.set_threshold(100_000)
    # Hides warnings about a missing GPU; errors of TensorFlow are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with errors_as_sentences():
        app(args=arguments)


if __name__ == "__main__":
    main()
