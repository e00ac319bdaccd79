"""Writes the documents of a released run, with the package and the tests that are on the path.

    python tests/compat/make_documents.py FOLDER

`two_wheels` runs it with an older package. It uses only what older trees have, too.
"""

import sys
from pathlib import Path


def main(folder: Path) -> None:
    from fedemb.runtime import planted_bug_suite
    from fedemb.runtime.provenance import privacy_code_digest
    from tests.kit.pipeline_runs import honest_run

    planted_bug_suite.RECORD = folder / "record.json"
    planted_bug_suite.write_record(
        planted_bug_suite.RECORD, passed=50, total=50, privacy_code_sha=privacy_code_digest()
    )
    run = honest_run.start(folder / "run").until_gate()
    run.do_gate()
    run.do_release()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
