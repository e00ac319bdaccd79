"""The code that README shows."""

import re

from tests.conftest import REPOSITORY

CODE = re.compile(r"<!-- quickstart -->\s*```python\n(.*?)```", re.DOTALL)


def lines_of_readme() -> str:
    """The code after the mark."""
    found = CODE.search((REPOSITORY / "README.md").read_text())
    assert found, "README.md shows the code after <!-- quickstart -->"
    return found.group(1)
