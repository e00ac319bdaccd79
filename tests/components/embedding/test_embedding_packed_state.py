"""Working state in one file: as it was, or a ValueError."""

import numpy as np
import pytest

from fedemb.training.server import pack, unpack

ARRAYS = {"weights": np.arange(3, dtype=np.float32), "none": np.zeros((0, 2))}
PACKED = pack({"rounds": 7, "tags": ["é"]}, ARRAYS)


def test_what_was_packed_comes_back():
    head, arrays = unpack(PACKED, *ARRAYS)
    assert head == {"rounds": 7, "tags": ["é"]}
    assert all(np.array_equal(arrays[name], value) for name, value in ARRAYS.items())
    assert all(arrays[name].dtype == value.dtype for name, value in ARRAYS.items())


@pytest.mark.parametrize("length", range(0, len(PACKED), 29))
def test_a_file_that_was_cut_is_a_value_error(length):
    with pytest.raises(ValueError, match="packed state"):
        unpack(PACKED[:length], *ARRAYS)


def test_an_array_that_is_not_there_is_a_value_error():
    with pytest.raises(ValueError, match="packed state"):
        unpack(PACKED, "momentum")
