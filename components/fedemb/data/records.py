"""The records that steps exchange: one per user, as tf.train.Example, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from fedemb.data.identity import Cell, SinglePrecision
from fedemb.errors import ArtifactError

if TYPE_CHECKING:
    from google.protobuf.message import Message


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


_EXAMPLE = """
name: "fedemb/example.proto" package: "tensorflow" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES MANY } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT MANY } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 MANY } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: ".tensorflow.BytesList" KIND }
  field { name: "float_list" number: 2 type_name: ".tensorflow.FloatList" KIND }
  field { name: "int64_list" number: 3 type_name: ".tensorflow.Int64List" KIND } }
message_type { name: "Features"
  field { name: "feature" number: 1 type_name: ".tensorflow.Features.FeatureEntry" MANY }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING ONE }
    field { name: "value" number: 2 type_name: ".tensorflow.Feature" ONE } } }
message_type { name: "Example"
  field { name: "features" number: 1 type_name: ".tensorflow.Features" ONE } }
"""
"""Descriptor of tf.train.Example, abbreviated by `_WORDS`."""
_WORDS = {
    "KIND": "ONE oneof_index: 0",
    "MANY": "label: LABEL_REPEATED",
    "ONE": "label: LABEL_OPTIONAL",
}


@cache
def example_class() -> type[Message]:
    """The message class of tf.train.Example, built in a pool of its own: no TensorFlow needed."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    text, pool = _EXAMPLE, descriptor_pool.DescriptorPool()
    for word, meaning in _WORDS.items():
        text = text.replace(word, meaning)
    pool.Add(text_format.Parse(text, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _features(data: bytes) -> Any:
    example: Any = example_class().FromString(data)
    return example.features.feature


def encode_example(features: Mapping[str, Sequence[bytes] | Sequence[int]]) -> bytes:
    """Serialises lists of bytes or integers as tf.train.Example; one value, one byte string."""
    example: Any = example_class()()
    for name, values in features.items():
        feature = example.features.feature[name]
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return example.SerializeToString(deterministic=True)


def example_values(record: bytes, names: Sequence[str]) -> dict[str, Cell] | None:
    """Returns the first value of each named feature of a tf.train.Example; None if invalid."""
    try:
        features = _features(record)
    except Exception:  # protobuf can raise anything at hostile bytes
        return None
    values: dict[str, Cell] = {}
    for name in names:
        if name in features:
            kind = features[name].WhichOneof("kind")
            listed = list(getattr(features[name], kind).value[:1]) if kind else []
            first = listed[0] if listed else None
            values[name] = SinglePrecision(first) if isinstance(first, float) else first
    return values


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
        feature = _features(data)
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
