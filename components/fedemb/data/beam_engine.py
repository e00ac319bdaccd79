"""Runs an Apache Beam pipeline in this process, or on the runner set in the options."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedemb import errors
from fedemb.errors import ConfigError, FedEmbError

if TYPE_CHECKING:
    import apache_beam as beam

IN_PROCESS = "apache_beam.runners.portability.fn_api_runner.FnApiRunner"
"""Beam's direct runner without its search for a faster engine to download."""


def run_on_beam(build: Callable[[beam.Pipeline], None], options: Sequence[str], doing: str) -> None:
    """Builds and runs a pipeline; failures are reported in one sentence.

    Beam logs exceptions of workers with their messages, which can quote data. So Beam's logger is
    disabled in this process during the run, and only messages of this package are passed on.

    Args:
      build: adds the transforms to a `beam.Pipeline`.
      options: Beam options; without a runner option, the pipeline runs in this process.
      doing: description of the pipeline for the error message.

    Raises:
      ConfigError: Beam refuses the options.
      FedEmbError: an error of this package in a worker, or the fact that Beam stopped.
    """
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions

    named = any(option.startswith("--runner") for option in options)
    flags = [*options] if named else [f"--runner={IN_PROCESS}", *options]
    try:
        given = PipelineOptions(flags)
        given.get_all_options()  # Beam checks most options only at run time
        pipeline = beam.Pipeline(options=given)
    except (Exception, SystemExit) as error:  # argparse exits at a bad value
        what = str(error).splitlines()[0][:300] if isinstance(error, ValueError) else "bad value"
        raise ConfigError(
            f"Apache Beam refuses the options given for its engine ({what}); see "
            "docs/how_to/partition.md"
        ) from error
    build(pipeline)
    logger = logging.getLogger("apache_beam")
    level = logger.level
    if not named:
        logger.setLevel(logging.CRITICAL)
    try:
        pipeline.run().wait_until_finish()
    except Exception as error:
        raise _in_one_sentence(error, doing) from error
    finally:
        logger.setLevel(level)


def _in_one_sentence(error: Exception, doing: str) -> FedEmbError:
    """Returns this package's original error from a Beam worker; else an error without data."""
    text = str(error)
    if isinstance(error, FedEmbError):
        return type(error)(re.sub(r" \[while running .*", "", text, flags=re.DOTALL))
    found = re.findall(r"fedemb\.errors\.(\w+): (.*?)(?: \[while running|\n|$)", text)
    kind = getattr(errors, found[-1][0], None) if found else None
    if kind is not None:
        return kind(found[-1][1])
    return FedEmbError(
        f"Beam stopped with {type(error).__name__} while {doing}. Partial output is ignored. "
        "Read the log of its workers, then run the step again."
    )
