"""The published figures come out; `poster.py` and `equal_utility.py` print them."""

import pytest

from tests.benchmarks import equal_utility, poster


@pytest.mark.slow
@pytest.mark.parametrize("row", list(poster.tree_rows()), ids=lambda row: row.name)
def test_tree_rows_of_the_poster_and_gboard(row):
    assert row.ok


def test_honest_figure_of_the_headline_row():
    group, doubled = poster.honest(1.28)
    assert group == pytest.approx(3.03, rel=5e-3)
    assert doubled == pytest.approx(9.42, rel=5e-3)
    assert poster.DELTA == 1e-7


@pytest.mark.slow
def test_every_row_of_the_poster():
    assert all(row.ok for row in poster.poster_rows())


@pytest.mark.slow
def test_table_of_equal_utility():
    assert equal_utility.show(equal_utility.table())


@pytest.mark.slow
def test_row_of_equal_utility_whose_gap_is_the_grid_of_losses():
    group, users, tree = equal_utility.cells(10_000_000)
    assert group.ok
    assert users.ok
    assert tree.ok
    assert group.ours == pytest.approx(0.501, abs=5e-5)
    assert group.at_settings == pytest.approx(0.505, abs=5e-5)
    assert "1e-5 gives 0.5009" in group.reason or "1e-5 gives 0.5010" in group.reason
    assert "digits" in users.reason
    assert tree.reason == ""
