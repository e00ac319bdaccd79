"""Which values name the same user: one rule over all types, shards and formats."""

from __future__ import annotations

import unicodedata
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.data.identity import (
    INEXACT,
    MISSING,
    NOT_TEXT,
    SinglePrecision,
    is_whole_decimal,
    name_problem,
    name_text,
)


@given(text=st.text())
def test_name_is_settled_and_the_same_for_all_spellings(text: str) -> None:
    canonical = name_text(text)
    if canonical is None:
        return
    assert name_text(canonical) == canonical
    canonical.encode()
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        spelled = f" \t{unicodedata.normalize(form, canonical)}\u200b\n"
        assert name_text(spelled) == canonical


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "7"),
        (7.0, "7"),
        (-0.0, "0"),
        (7.5, "7.5"),
        (np.int64(7), "7"),
        (np.float32(7), "7"),
        (b" 7 ", "7"),
        ("007", "007"),
        ("+7", "+7"),
        ("12e45", "12e45"),
        ("1e5", "1e5"),
        ("1.5", "1.5"),
        (True, "True"),
        ("\ufb01sh", "fish"),
        ("Ada", "Ada"),
        ("ada", "ada"),
        (1234567890123456789, "1234567890123456789"),
        ("1234567890123456789", "1234567890123456789"),
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (b"\xff\xfe", None),
        ("\u200b \ufeff", None),
        ([], None),
        ({}, None),
    ],
)
def test_user_id_has_one_spelling(value: object, expected: str | None) -> None:
    assert name_text(value) == expected


@pytest.mark.parametrize(
    "value", ["7.0", b"7.0", " 7.000 ", "\uff17.0", Decimal("7.00"), 7.0, np.float32(7)]
)
def test_whole_number_written_as_a_decimal_is_the_same_user(value: object) -> None:
    assert name_text(value) == name_text(7) == "7"
    assert is_whole_decimal(value)


@given(number=st.integers(-(2**53) + 1, 2**53 - 1))
def test_all_types_of_a_whole_number_are_one_user(number: int) -> None:
    spelled = (number, float(number), str(number), f"{number}.0", str(number).encode())
    assert {name_text(value) for value in spelled} == {str(number)}


@pytest.mark.parametrize("value", ["007.0", "+7.0", "7.", ".0", "1.0.0", "7.01"])
def test_text_that_no_number_is_written_as_stays(value: str) -> None:
    assert name_text(value) == value
    assert not is_whole_decimal(value)


@pytest.mark.parametrize(
    "value",
    [
        float(2**53),
        -1e300,
        float("inf"),
        SinglePrecision(2**24),
        np.float32(2**24),
        "9007199254740994.0",
        "1.5e+16",
        b"1.23457E+11",
        "1e+20",
    ],
)
def test_decimal_that_lost_digits_names_nobody_and_says_why(value: object) -> None:
    assert name_text(value) is None
    assert name_problem(value) == INEXACT


def test_largest_exact_numbers_are_ids() -> None:
    assert name_text(float(2**53 - 1)) == str(2**53 - 1)
    assert name_text(SinglePrecision(2**24 - 1)) == str(2**24 - 1)


@pytest.mark.parametrize(
    ("value", "problem"),
    [(None, MISSING), (float("nan"), MISSING), ("", MISSING), (b"\xff" * 16, NOT_TEXT)],
)
def test_reason_of_a_value_that_is_no_id(value: object, problem: str) -> None:
    assert name_text(value) is None
    assert name_problem(value) == problem
