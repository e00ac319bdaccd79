"""Bytes that a signature covers, and the exact form of signed documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemb.errors import ArtifactError
from fedemb.foundation.canonical_json import canonical_json, strict_json
from fedemb.foundation.document import Written

SIGNATURE = {"key_id": "k" * 32, "algorithm": "ed25519", "value": 'a"\\\u00e9'}
NAMES = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)


class Compact:
    """Stands for a document that is written in one line."""

    compact = True

    def __init__(self, content):
        self._content = content

    def content(self):
        return self._content


@given(st.dictionaries(NAMES.filter(lambda name: name != "signature"), VALUES, max_size=6))
@pytest.mark.parametrize("signature", [SIGNATURE, None])
def test_signed_bytes_are_canonical_json_of_content(signature, content):
    whole = content if signature is None else {**content, "signature": signature}
    written = Written(Compact(content), signature, canonical_json(whole))
    assert written.signed_bytes == canonical_json(content)
    assert written.is_exact
    assert not Written(Compact(content), signature, written.data + b" ").is_exact


@pytest.mark.parametrize("depth", [64, 65, 70])
def test_depth_is_limited_however_few_brackets_are_text(depth):
    data = b"[" * depth + b"]" * depth
    if depth <= 64:
        strict_json(data, "list")
    else:
        with pytest.raises(ArtifactError):
            strict_json(data, "list")
    assert strict_json(b'["' + b"[{" * 90 + b'"]', "text") == ["[{" * 90]
