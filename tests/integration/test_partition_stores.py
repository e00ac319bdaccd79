"""partition_users with input and output in a bucket, and on Beam's portable runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemb.data.identity import KeyRef
from fedemb.foundation.canonical_json import tree_digest
from fedemb.steps.partition_users import partition_images
from fedemb.storage import join, local_tree, open_store
from tests.kit.pipeline_runs.partition_run import (
    KEY,
    make_config,
    rows_of,
    write_parquet,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_bucket_gives_the_bytes_of_a_folder(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    uri: str = request.getfixturevalue(f"{kind}_store_uri")
    rows = rows_of(20)
    local = write_parquet(tmp_path / "rows.parquet", rows)
    public = write_parquet(tmp_path / "public.parquet", rows[:2])
    store = open_store(uri)
    store.write("in/rows.parquet", Path(local).read_bytes())
    store.write("in/public.parquet", Path(public).read_bytes())
    digests = {}
    for root, source, extra in (
        (str(tmp_path / "out"), local, public),
        (join(uri, "out"), join(uri, "in/rows.parquet"), join(uri, "in/public.parquet")),
    ):
        done = partition_images(
            make_config(source, pretraining={"kind": "supervised", "source": {"uri": extra}}),
            keys=KeyRef("", "", throwaway=KEY),
            root=root,
            blocks=None,
            header={},
        )
        assert done.counts["in_public_set"] == 2
        digests[root] = (done.users.digest, done.evaluation.digest)
        with local_tree(join(root, "users")) as folder:
            assert tree_digest(folder) == done.users.digest
    assert len(set(digests.values())) == 1
