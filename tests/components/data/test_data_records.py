"""User records survive the way through a file, and ids have one spelling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.data.records import UserRecord, decode_user, encode_example, encode_user
from fedemb.errors import ArtifactError

records = st.integers(0, 5).flatmap(
    lambda size: st.builds(
        UserRecord,
        user_key=st.integers(0, 2**64 - 1),
        images=st.tuples(*[st.binary(max_size=9)] * size),
        labels=st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * size),
        subgroup=st.text(st.characters(codec="utf-8"), max_size=5),
        block=st.text(st.characters(codec="utf-8"), max_size=5),
    )
)


@given(records)
def test_user_record_is_read_back_and_has_one_encoding(record: UserRecord) -> None:
    data = encode_user(record)
    assert decode_user(data) == record
    assert encode_user(decode_user(data)) == data


@pytest.mark.parametrize("data", [b"", b"\xff\xffjunk", encode_example({"images": [b"x"]})])
def test_what_is_no_user_record_is_one_sentence(data: bytes) -> None:
    with pytest.raises(ArtifactError, match="user record"):
        decode_user(data)


@pytest.mark.slow
def test_user_record_is_a_tensorflow_example() -> None:
    import tensorflow as tf

    data = encode_user(UserRecord(2**64 - 1, (b"x", b"y"), (3, -4), "s", "all/0"))
    features = tf.train.Example.FromString(data).features.feature
    assert list(features["labels"].int64_list.value) == [3, -4]
    assert list(features["images"].bytes_list.value) == [b"x", b"y"]
    assert features["user_key"].int64_list.value[0] == -1
