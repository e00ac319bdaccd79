"""Figure of the study of photos."""

from pathlib import Path

from studies.photos.figure import MEASURES, USERS, figure, gains
from studies.utility.page import standalone


def test_figure_of_the_pages_shows_the_table_of_the_study():
    rows = gains()
    assert set(rows) == {(noise, measure) for noise in USERS for measure in MEASURES}
    for seeds in rows.values():
        assert len(seeds) == 3
        assert all(0 < low < value < high for value, low, high in seeds)
    assert Path("docs/images/cars.svg").read_bytes() == standalone(figure())
