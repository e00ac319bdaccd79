"""`fedemb run`: prepare a run directory, run it, say how it ended.

Checks the stores of a run before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from fedemb import errors
from fedemb.config import RunConfig, SourceConfig
from fedemb.config.data import BUILTIN
from fedemb.errors import AwaitingApproval, ConfigError, LedgerError, Refused
from fedemb.foundation.addresses import nested
from fedemb.foundation.canonical_json import json_digest
from fedemb.foundation.environment import require_modules
from fedemb.foundation.files import write_bytes
from fedemb.keys import open_key_store, policy_key_name
from fedemb.ledger.root import TRUST_NAME
from fedemb.pipelines.output import say
from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.load_config import load_config, with_data, with_policy
from fedemb.pipelines.run.local import View, closing_lines, reused_steps, run_pipeline
from fedemb.pipelines.run.pages import collect_reports, render_index, run_headline
from fedemb.privacy.section import UNITS, count_of
from fedemb.reports.pages import NEXT
from fedemb.storage import open_store


def check_stores(config: RunConfig, config_name: str, runs: Path) -> None:
    """Refuses stores that mix what must stay apart or cannot be reached, or lack their ledger.

    `config_name` is shown in the command of the message. Raw artifacts are below `runs` unless the
    configuration moves them.

    Raises:
      ConfigError: keys beside the ledger, Raw beside public artifacts, or a lasting ledger without
        lasting keys.
      LedgerError: the remote ledger was never made.
      StorageError: a store cannot be reached.
    """
    storage = config.storage
    if storage.ledger is not None and storage.keys is None:
        raise ConfigError(
            f"the ledger {storage.ledger} lasts, so its keys must last too, and elsewhere; set "
            "storage.keys to a folder or Secret Manager, the same for every run"
        )
    places = {
        f"storage.{name}": place
        for name in ("public_root", "private_root", "ledger", "keys", "releases")
        if (place := getattr(storage, name)) is not None
    }
    pairs = [
        (first, second)
        for first, second in combinations(places, 2)
        if {first, second} & {"storage.private_root", "storage.keys"}
    ]
    if storage.private_root is None and storage.public_root is not None:
        places["--runs"] = str(runs)
        pairs.append(("storage.public_root", "--runs"))
    for first, second in pairs:
        if nested(places[first], places[second]):
            raise ConfigError(
                f"{first}={places[first]} and {second}={places[second]} lie one inside the "
                "other; private and public data, and keys and what they protect, must be apart: "
                "name another place"
            )
    if storage.ledger is not None:
        store = open_store(storage.ledger)
        if store.local_root is None and not store.exists(TRUST_NAME):
            raise LedgerError(
                f"No ledger in {store.uri}. Check the address. For a new ledger run `fedemb "
                f"ledger init --config {config_name} --ledger {store.uri} --keys "
                f"{storage.keys}` with the --set options of this run, then run again."
            )
    if storage.keys is not None:
        open_key_store(storage.keys).exists(policy_key_name(config.policy.policy_id))
    for place in filter(None, (storage.private_root, storage.public_root, storage.releases)):
        open_store(place).exists(TRUST_NAME)  # whether it can be reached


_MINUTES = 3
"""Minutes of a run of the presets with generated images, on two cores."""


def run(
    config: RunConfig | str | Path,
    *,
    data: str | None = None,
    policy: str | Path | None = None,
    runs: str | Path = "runs",
    run_id: str | None = None,
) -> RunDirectory:
    """Runs the whole pipeline on this machine, as `fedemb run` does, and prints how it goes.

    Args:
      config: a configuration, a YAML file, or the name of a preset.
      data: the images: replaces `data.source.uri`.
      policy: folder of a lasting ledger, and its keys; default: FEDEMB_POLICY. Images that are
        not built in need one, unless the configuration names these stores.
      runs: folder of all runs.
      run_id: name of the run; None: one from time and chance.

    Returns:
      The directory of the finished run; its `index` is the page to open first.

    Raises:
      FedEmbError: of the kind, and with the message, that the step ended with; the run can be
        resumed.
    """
    folder = None if policy is None else Path(policy)
    directory = prepare(config, (), Path(runs), run_id, data, policy=folder)
    with directory.alone():
        exit_code = execute(directory)
    if exit_code:
        state = directory.read_state()
        kind = getattr(errors, str(state.error), errors.FedEmbError)
        raise kind(f"{state.message or 'the run failed'}; see {directory.log}")
    return directory


def prepare(
    config: RunConfig | str | Path,
    overrides: Sequence[str],
    parent: Path,
    run_id: str | None = None,
    data: str | None = None,
    *,
    policy: Path | None = None,
) -> RunDirectory:
    """Checks the configuration, makes the run directory, and draws the built-in data if asked for.

    Arguments as for `run`; `overrides` are `dotted.key=value` each.

    Raises:
      ConfigError: the configuration is wrong. Nothing has been written.
      LedgerError: the ledger is in a bucket, and was never made there.
      InputError: a run of this name exists, or the backbone to import does not.
      ArtifactError: the backbone to import cannot be trained here.
    """
    return make_directory(checked(config, overrides, parent, data, policy), parent, run_id, data)


def _require_packages(config: RunConfig) -> None:
    """Raises ConfigError if a package of a step is not installed, before anything is written."""
    require_modules("kfp", "apache_beam", *sorted({"tensorflow", config.training.backend}))


def make_directory(
    loaded: RunConfig, parent: Path, run_id: str | None, data: str | None
) -> RunDirectory:
    """What `prepare` does with the configuration that it has checked."""
    _require_packages(loaded)
    for line in announcement(loaded):
        say(line)
    if data is not None:
        for line in _stated(loaded):
            say(line)
    public = loaded.pretraining.source
    if BUILTIN in (loaded.data.source.uri, public.uri if public else None):
        loaded = _with_builtin_data(loaded, parent)
    return RunDirectory.create(parent, run_id, loaded)


def announcement(config: RunConfig) -> list[str]:
    """Returns what a run will do and about how long it takes, as lines."""
    model = "a classifier" if config.task == "classification" else "an embedding model"
    rounds = count_of(config.mechanism.rounds, "round")
    ends = {
        "release": "It evaluates and audits the model, and releases it if the gate allows.",
        "simulation": "It evaluates and audits the model. A simulation is never released.",
    }
    if config.data.source.uri == BUILTIN:
        images = f"generated images of {config.data.builtin.users:,} users"
        time = f"about {_MINUTES} minutes on two cores"
    else:
        images = f"the images at {config.data.source.uri}"
        time = "the remaining time is shown after the first rounds"
    return [
        f"This run trains {model} with differential privacy on {images}, in {rounds}. "
        + ends[config.purpose],
        f"Time: {time}. Ctrl-C stops after the current round; the run can be resumed.",
    ]


def checked(
    config: RunConfig | str | Path,
    overrides: Sequence[str],
    parent: Path,
    data: str | None = None,
    policy: Path | None = None,
) -> RunConfig:
    """The configuration that `prepare` would run; writes nothing, arguments and errors as there."""
    loaded = config if isinstance(config, RunConfig) else load_config(config, overrides)
    found = with_policy(with_data(loaded, data), policy)
    if found.data.source.uri != BUILTIN and found.storage.ledger is None:
        raise ConfigError(
            f"The images at {found.data.source.uri} are private, and their budget must outlast "
            "this run. Pass a folder for ledger and keys by --policy, or set storage.ledger "
            "and storage.keys."
        )
    check_stores(found, "RunConfig" if loaded is config else str(config), parent)
    if found.pretraining.kind == "import":
        from fedemb.models.imported import check_images, check_import, with_card

        path = Path(found.pretraining.import_path or "")
        check_import(path, found.model.trainable)
        check_images(path, found.model)
        stated = with_card(path, found.pretraining)
        if stated != found.pretraining:
            found = found.updated({"pretraining": stated.model_dump(mode="json")})
    return found


def _stated(config: RunConfig) -> list[str]:
    """Returns the claims of a configuration about images that it may not have been written for."""
    start, tuning, policy = config.pretraining, config.tuning, config.policy
    origin = start.import_path if start.kind == "import" else start.source and start.source.uri
    public = f"{start.kind}, from {origin}"
    return [
        f"public backbone: {public if start.kind != 'none' else 'none'}",
        f"stated in the configuration: at least {policy.users_lower_bound:,} "
        f"{UNITS[policy.unit].many}; settings chosen on {tuning.data} data"
        f"{f' ({tuning.method})' if tuning.method else ''}. Check both, or write a configuration "
        "for these images with `fedemb init`",
    ]


def _with_builtin_data(config: RunConfig, parent: Path) -> RunConfig:
    """Draws the glyphs once per parameter set, below `<runs>/builtin-data/`."""
    from fedemb.data.builtin import write_builtin

    size = config.model.image_size
    digest = json_digest({**config.data.builtin.model_dump(), "size": size})[:12]
    folder = parent.resolve() / "builtin-data" / digest
    private, public = folder / "private.parquet", folder / "public.parquet"
    if not (private.exists() and public.exists()):
        started = time.monotonic()
        write_builtin(config.data.builtin, size, private, public)
        say(
            f"drew {config.data.builtin.users:,} glyph identities in "
            f"{time.monotonic() - started:.1f} s"
        )
    overrides: dict[str, Any] = {}
    if config.data.source.uri == BUILTIN:
        overrides["data.source.uri"] = str(private)
    source = config.pretraining.source
    if source is not None and source.uri == BUILTIN:
        public_source = SourceConfig(uri=str(public), label_scope="global")
        overrides["pretraining.source"] = public_source.model_dump(mode="json")
    return config.updated(overrides)


def execute(run: RunDirectory, start: str | None = None) -> int:
    """Runs or resumes a run directory, prints the closing lines and returns the exit code.

    A completed run is not run again, unless `start` names a step.

    Raises:
      InputError: the step does not exist, or an earlier step has not finished.
    """
    say(f"run {run.run_id} in {run.root}")
    state = run.read_state()
    if start is None and state.exit_code == 0 and state.closing_lines:
        say("Run already completed; no step is run again.")
    else:
        _require_packages(run.config())
        state = run_pipeline(run, View(say), reused_steps(run, start))
        state.closing_lines = closing_lines(run, state)
        run.write_state(state)
        collect_reports(run)
        write_bytes(run.index, render_index(run).encode())
    exit_code = state.exit_code or 0
    say(*state.closing_lines)
    say(f"report: {run.index}")
    if then := NEXT.get(run_headline(run, ended=True).state):
        say(f"next: {then}")
    if exit_code == AwaitingApproval.exit_code:
        say(f"after the approvals: {run.resumed_by} --from gate_release")
    elif exit_code not in (0, Refused.exit_code):
        say(f"resume with: {run.resumed_by}")
    return exit_code
