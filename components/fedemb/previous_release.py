"""An earlier release that a new model is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedemb.bundle import bundle_address, check_pinned
from fedemb.errors import ArtifactError, SignatureInvalid
from fedemb.step_context import StepContext
from fedemb.storage import local_tree


@contextmanager
def read_release(context: StepContext, uri: str) -> Iterator[Path]:
    """The model file of an earlier release, which is whole and signed under this ledger's keys.

    Args:
      context: of the step; its ledger's trust file pins the keys.
      uri: the bundle, see `bundle_address`.

    Raises:
      ArtifactError: there is none, or it cannot be read.
      SignatureInvalid: a file was changed, or nobody trusted signed it.
      StorageError: the store cannot be reached.
    """
    address, marked = bundle_address(uri)
    with local_tree(address) as bundle:
        try:
            manifest, _ = check_pinned(bundle, context.trust)
        except (ArtifactError, SignatureInvalid) as error:
            raise SignatureInvalid(
                f"evaluation.previous_release {uri} is no release under the keys of this ledger: "
                f"{error}; name one that release_model published, or leave it out"
            ) from error
        if marked not in (None, manifest.sha):
            raise SignatureInvalid(
                f"the release marker of {uri} names another bundle than lies there"
            )
        yield bundle / "backbone.keras"
