"""Imports from tensorflow-privacy: the query protocol, and two of its queries."""

# pyright: reportMissingTypeStubs=false
from __future__ import annotations

import sys

from fedemb.errors import ConfigError

# Its __init__ imports TF-1 estimators that no longer exist; this is its own switch to skip them.
sys.skip_tf_privacy_import = True  # pyright: ignore[reportAttributeAccessIssue]
try:
    from tensorflow_privacy.privacy.dp_query import dp_query, normalized_query
except ModuleNotFoundError as error:
    raise ConfigError(
        f"{error.name} is not installed. pip does not install it with fedemb, because it pins a "
        "dp-accounting that does not support these mechanisms. Run `pip install --no-deps "
        "tensorflow-privacy==0.9.0`, or install from the locks in requirements/."
    ) from error

__all__ = ["dp_query", "normalized_query"]
