"""A user with images on both sides of the split is held out whole, whichever side is larger."""

from collections import Counter

import pytest

from fedemb.data.identity import Hasher
from fedemb.partition.prepare import Assigner, settle
from tests.kit.pipeline_runs.partition_run import make_config

USER = bytes(range(16))


def images(side, count):
    return {f"{side} {n}".encode(): (n, 1, b"png") for n in range(count)}


@pytest.mark.parametrize(("train", "held"), [(1, 5), (5, 1), (2, 2), (200, 1), (0, 3), (3, 0)])
def test_one_held_out_image_holds_out_the_whole_user(train, held):
    assigner, counts = Assigner(make_config("rows.parquet"), Hasher(bytes(32)), None), Counter()
    part = (None, None, images("train", train), images("held", held), train, held)
    found = settle(USER, part, {"all"}, assigner, counts)
    assert found.held_out == (held > 0)
    side = "held" if held else "train"
    assert dict(found.images) == images(side, held or train)
    assert counts["dropped_cross_split"] == (train if held else 0)
