"""A secret in an address is refused where addresses are parsed, and printed by no command."""

import pytest

from fedemb.errors import ConfigError, InputError
from fedemb.foundation.addresses import credentials_in, redacted, split_address
from fedemb.keys import open_key_store
from fedemb.storage import open_store


@pytest.mark.parametrize(
    "address",
    [
        "s3://KEY:TOPSECRET@bucket/x",
        "gs://TOPSECRET@bucket/x",
        "s3://bucket:9000/x",
        "gs://bucket/x?X-Goog-Signature=TOPSECRET",
        "s3://bucket/x?AWSAccessKeyId=a&Signature=TOPSECRET",
        "s3://[TOPSECRET@x",
        "s3://KEY:TOP/TOPSECRET@bucket/x",
        "s3://KE/Y:TOPSECRET@bucket/x",
    ],
)
def test_address_with_a_secret_is_refused_without_printing_it(address):
    for parse in (split_address, open_store, open_key_store):
        with pytest.raises((InputError, ConfigError)) as refused:
            parse(address)
        assert "TOPSECRET" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["gs://bucket/a@b/c", "file:///a:b@c", "/tmp/a:b@c", "me@example.org", "s3://b/x y"]
)
def test_address_without_a_secret_is_not_redacted(address):
    assert not credentials_in(address)
    assert redacted(address) == address


def test_secrets_of_addresses_in_a_text_are_redacted():
    text = "no s3://K:TOP@b/x, s3:/K:TOP@b/x and https://h/x?a=1&X-Amz-Signature=TOP&b=2"
    assert redacted(text) == (
        "no s3://***@b/x, s3:/***@b/x and https://h/x?a=1&X-Amz-Signature=***&b=2"
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (r"https:\\u:TOP@h", r"https:\\***@h"),
        ("s3:K:TOP@b", "s3:***@b"),
        ("https://h/?api_key=TOP&b=2", "https://h/?api_key=***&b=2"),
        ("s3://b?access_token=TOP", "s3://b?access_token=***"),
        ("s3://b/user_key=5/x and cpu=h:5000/x@sha256:0", None),
    ],
)
def test_secrets_of_mistyped_addresses_and_queries_are_not_shown(text, shown):
    assert redacted(text) == (shown or text)
