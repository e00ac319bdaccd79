"""Writes the documents of a released run, with the package and the tests that are on the path.

    python tests/compat/make_documents.py FOLDER

`two_wheels` runs it with an older package. It uses only what older trees have, too.
"""

import sys
from pathlib import Path


def main(folder: Path) -> None:
    from tests.kit.pipeline_runs import honest_run

    run = honest_run.start(folder / "run").until_gate()
    run.do_gate()
    run.do_release()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
