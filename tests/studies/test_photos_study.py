"""Figure of the study of photos."""

from pathlib import Path

from studies.photos.figure import METHODS, figure, gains
from studies.shared import standalone


def test_figure_of_the_pages_shows_the_tables_of_the_study():
    found = gains()
    assert set(found) == set(METHODS)
    for rows in found.values():
        assert len(rows) >= 2
        for row in rows:
            assert len(row.seeds) == 3
            assert all(low < value < high for value, low, high in row.seeds)
    assert Path("docs/images/cars.svg").read_bytes() == standalone(figure())
