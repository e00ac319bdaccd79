"""An edit finds its code by syntax: formatting does not matter, a missing code is an error."""

import pytest

from tests.planted_bugs.edits import Edit, edited

SOURCE = """
class Sum:
    def record(self, update):
        # Clip first.
        norm = length(
            update,
        )
        return scale(update, 1.0 / max(1.0, norm))

    def noised(self, total):
        return total + self.draw("sum")


def record(update):
    return update
"""


@pytest.mark.parametrize(
    ("function", "old", "new", "wanted"),
    [
        ("noised", 'self.draw("sum")', "0", "return total + 0"),
        ("Sum.record", "norm = length(update)", "norm = 0", "norm = 0"),
        ("Sum.record", "norm = length( update )\nreturn scale(update, 1.0 / max(1.0, norm))",
         "return update", "return update"),
        ("noised", "return total + self.draw('sum')", "total += 1\nreturn total", "total += 1"),
        ("", "total", "None", "None + self.draw"),
    ],
)  # fmt: skip
def test_code_is_found_however_it_is_formatted(function, old, new, wanted):
    text = edited(SOURCE, Edit("sums", function, old, new))
    assert wanted in text
    assert text.count("def ") == SOURCE.count("def ")
    compile(text, "sums.py", "exec")


def test_deleted_statement_leaves_a_block_that_runs():
    text = edited(SOURCE, Edit("sums", "noised", 'return total + self.draw("sum")', ""))
    assert "pass" in text
    compile(text, "sums.py", "exec")


@pytest.mark.parametrize(
    ("function", "old", "problem"),
    [
        ("record", "update", "2 functions"),
        ("Sum", "update", "occurs"),
        ("noised", "total - 1", "occurs 0 times"),
        ("gone", "total", "0 functions"),
    ],
)
def test_code_that_is_missing_or_not_unique_is_an_error(function, old, problem):
    with pytest.raises(ValueError, match=problem):
        edited(SOURCE, Edit("sums", function, old, "None"))
