"""`fedemb disclose`: the standard disclosure of a release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from fedemb.foundation.canonical_json import JsonFields, canonical_json
from fedemb.foundation.files import write_bytes
from fedemb.pipelines.cli.trusted import TrustOption, trust_of
from fedemb.pipelines.output import say


def disclose(
    bundle: Annotated[str, typer.Argument(help="Release, as for `fedemb verify`.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder to write to; existing files are replaced."),
    ],
    trust: TrustOption = None,
) -> None:
    """Write the differential privacy disclosure of a release, from its signed fields.

    Writes disclosure.md and disclosure.json with the topics of NIST SP 800-226, and
    deployment.yaml with the fields of the registry of differential privacy deployments.

    Example: fedemb disclose releases/glyphs/1.0 -o disclosure --trust trust.json
    """
    from fedemb.serving.bundle import locate
    from fedemb.steps.release_model.disclosure import disclosure, markdown, registry_yaml
    from fedemb.steps.release_model.verify import read_release
    from fedemb.storage import local_tree

    with local_tree(locate(bundle).address) as tree:
        content = disclosure(read_release(tree, trust_of(tree, trust)))
    write_bytes(output / "disclosure.json", canonical_json(cast("JsonFields", content)))
    write_bytes(output / "disclosure.md", markdown(content).encode())
    write_bytes(output / "deployment.yaml", registry_yaml(content).encode())
    say(f"disclosure: {output / 'disclosure.md'}")
    say(f"To be completed by the publisher: {', '.join(content['to_be_completed'])}")
