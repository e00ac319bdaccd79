"""The records that steps exchange: one per user, as tf.train.Example, without TensorFlow.

Also the rules of identity: which user ids are the same user, which values are the same class.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from fedemb.errors import ArtifactError

_INVISIBLE = ("Cc", "Cf", "Cs")
"""Unicode categories that no reader sees: control, format (zero width), lone surrogates."""


@dataclass(frozen=True)
class UserRecord:
    """One user with everything they own."""

    user_key: int
    """Keyed hash of the canonical user id, unsigned 64 bit."""
    images: tuple[bytes, ...]
    """Canonical PNGs in keyed-hash order; see `pixels`."""
    labels: tuple[int, ...]
    """Keyed class of each image, signed 64 bit; the same class has the same number everywhere."""
    subgroup: str = ""
    """Attribute by which evaluation is broken down."""
    block: str = ""
    """Ledger block, `cohort/bucket`."""


@cache
def example_class() -> Any:
    """The message class of tf.train.Example, built in a pool of its own: no TensorFlow needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="fedemb/example.proto", package="tensorflow", syntax="proto3"
    )

    def message(name: str, *fields: tuple[str, int, int, int, str], parent: Any = file) -> Any:
        added = (parent.message_type if parent is file else parent.nested_type).add(name=name)
        for field_name, number, kind, label, type_name in fields:
            added.field.add(
                name=field_name, number=number, type=kind, label=label, type_name=type_name or None
            )
        return added

    many, one = field.LABEL_REPEATED, field.LABEL_OPTIONAL
    message("BytesList", ("value", 1, field.TYPE_BYTES, many, ""))
    message("FloatList", ("value", 1, field.TYPE_FLOAT, many, ""))
    message("Int64List", ("value", 1, field.TYPE_INT64, many, ""))
    feature = message(
        "Feature",
        ("bytes_list", 1, field.TYPE_MESSAGE, one, ".tensorflow.BytesList"),
        ("float_list", 2, field.TYPE_MESSAGE, one, ".tensorflow.FloatList"),
        ("int64_list", 3, field.TYPE_MESSAGE, one, ".tensorflow.Int64List"),
    )
    feature.oneof_decl.add(name="kind")
    for member in feature.field:
        member.oneof_index = 0
    entry = ".tensorflow.Features.FeatureEntry"
    features = message("Features", ("feature", 1, field.TYPE_MESSAGE, many, entry))
    message(
        "FeatureEntry",
        ("key", 1, field.TYPE_STRING, one, ""),
        ("value", 2, field.TYPE_MESSAGE, one, ".tensorflow.Feature"),
        parent=features,
    ).options.map_entry = True
    message("Example", ("features", 1, field.TYPE_MESSAGE, one, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def encode_example(features: Mapping[str, Sequence[bytes] | Sequence[int]]) -> bytes:
    """Serialises lists of bytes or integers as tf.train.Example; one value, one byte string."""
    example = example_class()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return example.SerializeToString(deterministic=True)


def encode_user(record: UserRecord) -> bytes:
    """Serialises a user record; the same record gives the same bytes."""
    signed = record.user_key - (1 << 64) if record.user_key >= 1 << 63 else record.user_key
    return encode_example(
        {
            "user_key": [signed],
            "images": record.images,
            "labels": record.labels,
            "subgroup": [record.subgroup.encode()],
            "block": [record.block.encode()],
        }
    )


def decode_user(data: bytes) -> UserRecord:
    """Reads what `encode_user` wrote.

    Raises:
      ArtifactError: not a user record.
    """
    try:
        feature = example_class().FromString(data).features.feature
        return UserRecord(
            user_key=feature["user_key"].int64_list.value[0] % (1 << 64),
            images=tuple(feature["images"].bytes_list.value),
            labels=tuple(feature["labels"].int64_list.value),
            subgroup=feature["subgroup"].bytes_list.value[0].decode(),
            block=feature["block"].bytes_list.value[0].decode(),
        )
    except Exception as error:
        raise ArtifactError(
            "a user record cannot be read; run partition_users again with this version"
        ) from error


def canonical_text(value: Any) -> str | None:
    r"""Returns the one spelling of a value that names something (user, class, cohort).

    Unicode forms are unified (NFKC), white space is collapsed, invisible characters vanish, whole
    numbers lose their type (`7`, `7.0`, `b"7"` and `"7"` are one). Case and leading zeros of text
    stay.

    Returns:
      The text, or None for what names nothing: null, NaN, empty, bytes that are not UTF-8.

    >>> canonical_text("  Ada\u00a0Lo\u0308we "), canonical_text(7.0), canonical_text("")
    ('Ada Löwe', '7', None)
    """
    if isinstance(value, dict | list | tuple | bytearray):
        return None
    return _canonical_text(value.item() if hasattr(value, "item") else value)


@lru_cache(1 << 16, typed=True)
def _canonical_text(value: Any) -> str | None:
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() else repr(value)
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            return None
    if value is None:
        return None
    text = str(value)
    if not (text.isascii() and text.isalnum()):
        text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in _INVISIBLE)
        text = " ".join(unicodedata.normalize("NFKC", text).split())
    return text or None


def canonical_user_id(value: Any) -> str | None:
    """Returns the one spelling of a user id, or None if the value names nobody.

    See `canonical_text` for what counts as the same. Joining too much is the safe error: two
    people with one id are protected together.
    """
    return canonical_text(value)
