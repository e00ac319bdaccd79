"""The code of the notebook, which README shows too."""

import json

from tests.conftest import REPOSITORY


def code_of_notebook() -> str:
    """Returns the code cells of the notebook, with an empty line between two."""
    notebook = json.loads((REPOSITORY / "docs" / "examples" / "quickstart.ipynb").read_text())
    cells = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return "\n\n".join("".join(lines) for lines in cells) + "\n"
