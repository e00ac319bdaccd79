"""Reads an earlier release that a new model is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedemb.errors import ArtifactError, SignatureInvalid
from fedemb.runtime.step_context import StepContext
from fedemb.serving.bundle import check_marker, check_origin, fetched, locate


@contextmanager
def read_release(context: StepContext, uri: str) -> Iterator[Path]:
    """Yields the model file of an earlier release after checking it with this ledger's keys.

    Raises:
      ArtifactError: the release does not exist or cannot be read.
      SignatureInvalid: a file was changed, or the signing key is not trusted.
      StorageError: the store cannot be reached.
    """
    found = locate(uri)
    with fetched(found) as bundle:
        try:
            manifest, copy = check_origin(bundle, context.trust)
            check_marker(found, manifest, copy.chain.trust)
        except (ArtifactError, SignatureInvalid) as error:
            raise SignatureInvalid(
                f"evaluation.previous_release {uri} is not a release under the keys of this "
                f"ledger: {error}; set it to one that release_model published, or omit it"
            ) from error
        yield bundle / "backbone.keras"
