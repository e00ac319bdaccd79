"""Reads two runs for a comparison: signed documents, configuration and durations."""

from __future__ import annotations

from fedemb.pipelines.run.directory import RunDirectory
from fedemb.pipelines.run.headline import run_headline
from fedemb.pipelines.run.signed import readable, signed_pretrained, signed_report, signed_utility
from fedemb.pipelines.steps import pipeline_of
from fedemb.reports.comparison import ComparedRun


def compared_run(run: RunDirectory) -> ComparedRun:
    """Returns one side of a comparison; documents that cannot be verified are left out.

    Raises:
      ArtifactError: the configuration or the state of the run is damaged.
    """
    report = readable(lambda: signed_report(run))
    utility = readable(lambda: signed_utility(run))
    pretrained = readable(lambda: signed_pretrained(run))
    config, took = run.config(), run.read_state().seconds
    return ComparedRun(
        name=run.run_id,
        headline=run_headline(run),
        config=config,
        report=report and report.body,
        utility=utility and utility.body,
        pretrained=pretrained and pretrained.body,
        seconds={name: took[name] for name in pipeline_of(config).steps if name in took},
    )
