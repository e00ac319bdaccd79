"""Keys and trust: secrets in a key store, signatures, trusted public keys."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from fedemb.errors import ConfigError
from fedemb.foundation.addresses import split_address
from fedemb.foundation.files import require_folder
from fedemb.keys.stores import KEY_BYTES as KEY_BYTES
from fedemb.keys.stores import KeyStore as KeyStore
from fedemb.keys.stores import LocalKeyStore as LocalKeyStore
from fedemb.keys.stores import commit_to as commit_to
from fedemb.keys.stores import commit_to_users as commit_to_users
from fedemb.keys.stores import commitment_key as commitment_key
from fedemb.keys.stores import derive as derive
from fedemb.keys.stores import partition_key as partition_key
from fedemb.keys.stores import policy_key_name as policy_key_name
from fedemb.keys.stores import reservation_key_name as reservation_key_name


def open_key_store(uri: str) -> KeyStore:
    """Opens a key store: a folder (path or `file:///path`) or `gsm://project[/prefix]`.

    Raises:
      ConfigError: the kind of store is not supported. Object stores are refused: they keep versions
        and copies of destroyed keys.
      InputError: a file exists at the path of the folder.
      StorageError: the store cannot be reached.
    """
    scheme = uri.partition("://")[0] if "://" in uri else ""
    if scheme not in ("", "gsm", "file"):
        raise ConfigError(
            f"unsupported key store {scheme}://...: buckets keep copies of destroyed keys; use a "
            "folder or gsm://project"
        )
    parts = split_address(uri)
    if parts.scheme == "gsm":
        from fedemb.keys.secret_manager import SecretManagerKeyStore

        return SecretManagerKeyStore(parts.netloc, parts.path.strip("/") or "fedemb")
    if parts.scheme == "file":
        return _local(Path(unquote(parts.path)))
    return _local(Path(uri))


def _local(root: Path) -> LocalKeyStore:
    require_folder(root, "the key store")
    return LocalKeyStore(root)
