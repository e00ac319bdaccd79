"""Pytest plugin of `make planted-bugs`: writes into the package what the suite found."""

import pytest

from tests.kit import shapes

shapes.install()  # this plugin is loaded before tests/conftest.py, and imports rooms

from fedemb.runtime.planted_bug_suite import KNOWN_BUGS, RECORD, write_record  # noqa: E402
from fedemb.runtime.provenance import privacy_code_digest  # noqa: E402


class PlantedBugRecord:
    """Counts the tests that carry the mark, and those that passed; with `-n`, of all processes."""

    def __init__(self):
        self.total = self.passed = 0
        self.caught: list[str] = []
        """Bug, where it was put, what caught it: of those patched into the product."""

    def pytest_collection_finish(self, session):
        marks = [item.get_closest_marker("planted_bug") for item in session.items]
        self.total = len(marks)
        planted = {number for mark in marks for number in mark.args}
        missing = set(range(1, KNOWN_BUGS + 1)) - planted
        if missing and marks:  # a process that hands out the tests has none
            raise pytest.UsageError(
                f"no test plants the bugs {sorted(missing)} of tests/planted_bugs/README.md"
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.total = len(ids)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed += 1
            self.caught += [text for name, text in report.user_properties if name == "planted"]

    def pytest_sessionfinish(self, session):
        if self.total and not hasattr(session.config, "workerinput"):
            digest = privacy_code_digest()
            write_record(RECORD, passed=self.passed, total=self.total, privacy_code_sha=digest)

    def pytest_terminal_summary(self, terminalreporter):
        for line in self.caught:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            f"planted-bug suite: {self.passed} of {self.total} passed, all {KNOWN_BUGS} known bugs "
            f"planted; {RECORD.name} says so of this code"
        )


def pytest_configure(config):
    config.pluginmanager.register(PlantedBugRecord())
