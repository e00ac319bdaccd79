"""The published figures come out; `poster.py` prints them."""

import pytest
from poster import DELTA, equal_utility_rows, honest, main, poster_rows, show, tree_rows


@pytest.mark.parametrize("row", list(tree_rows()), ids=lambda row: row.name)
def test_tree_rows_of_the_poster_and_gboard(row):
    assert row.ok


def test_honest_figure_of_the_headline_row():
    group, doubled = honest(1.28)
    assert group == pytest.approx(3.03, rel=5e-3)
    assert doubled == pytest.approx(9.42, rel=5e-3)
    assert DELTA == 1e-7


@pytest.mark.slow
def test_every_row_of_the_poster():
    assert all(row.ok for row in poster_rows())


@pytest.mark.slow
def test_table_of_equal_utility():
    assert show(equal_utility_rows())


def test_a_row_that_is_off_is_said_and_fails(monkeypatch, capsys):
    import poster

    monkeypatch.setattr(poster, "poster_rows", lambda: iter([poster.Row("x", 1.0, 1.01)]))
    assert main(["--quick"]) == 1
    assert "OFF BY -0.99%" in capsys.readouterr().out
