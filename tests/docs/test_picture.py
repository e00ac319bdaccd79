"""The picture of README shows the page that a run has today."""

from PIL import Image

from tests.docs.picture import KEY, PICTURE, SIZE, templates_digest


def test_readme_picture_matches_the_current_templates():
    """On failure run `make readme`."""
    picture = Image.open(PICTURE)
    assert picture.info.get(KEY) == templates_digest()
    assert picture.size == SIZE
