"""Runs the pipeline of a run directory with every step in a container; a program for the tests.

python pipeline_in_containers.py RUN_DIRECTORY LIGHT_IMAGE CPU_IMAGE DATA_FOLDER
"""

import sys
from pathlib import Path


def main(root: Path, light: str, cpu: str, data: Path) -> None:
    """Runs it; ends with a traceback if a step fails."""
    from kfp import local

    from fedemb.pipelines.dp_fedemb import DP_FEDEMB
    from fedemb.pipelines.graph import build_pipeline, pipeline_arguments
    from fedemb.pipelines.run.directory import RunDirectory
    from fedemb.runtime.step import PLACEHOLDER_IMAGES
    from tests.kit.servers.docker_runner import (
        container_runner,  # beside this file
    )

    run = RunDirectory.open(root)
    images = {
        PLACEHOLDER_IMAGES["light"]: light,
        PLACEHOLDER_IMAGES["cpu"]: cpu,
        PLACEHOLDER_IMAGES["trainer"]: cpu,
    }
    runner = container_runner(images=images, mounts=[run.root], read_only_mounts=[data])
    local.init(runner=runner, pipeline_root=str(run.public), raise_on_error=True)
    build_pipeline(DP_FEDEMB, run.run_id)(**pipeline_arguments(run.config(), **run.stores()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
