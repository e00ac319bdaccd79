"""What a run shows while it runs, on a terminal and in a log."""

from fedemb.documents.artifacts import Public
from fedemb.pipelines.dp_fedemb import DP_FEDEMB


def test_outputs_are_published_by_type():
    kinds = {kind for outputs in DP_FEDEMB.published().values() for kind in outputs.values()}
    assert Public in kinds
    assert {kind.__name__ for kind in kinds} == {"Public", "Noised"}
