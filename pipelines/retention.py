"""The pipeline of retention: deletes expired data of runs, on a schedule of its own."""

from fedemb.config.parameters import PARAMETERS, Parameter
from fedemb.pipelines.graph import Pipeline

RETENTION = Pipeline(
    "retention",
    "Deletes expired data of runs; never the ledger, keys and releases",
    ("delete_expired",),
    at_exit=None,
    parameters={
        "private_root": PARAMETERS["private_root"],
        "public_root": Parameter(
            str,
            "Root of the runs' outputs: the pipeline root of the runs; empty: not searched.",
            "",
        ),
        "ledger": PARAMETERS["ledger"],
        "retention": Parameter(
            str,
            "Days until each kind of data expires, as JSON: private_days, working_days, open_days, "
            "public_days, released_public_days; null: never.",
            "{}",
        ),
        "dry_run": Parameter(bool, "Whether expired data is only listed.", True),
    },
)
