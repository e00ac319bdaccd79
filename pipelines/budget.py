"""The pipeline of budgets: shows all budgets and sends alerts, on a schedule of its own."""

from fedemb.config.parameters import PARAMETERS, Parameter
from fedemb.pipelines.graph import Pipeline

BUDGET = Pipeline(
    "budget",
    "Shows the budget of all policies, and alerts on low budgets and schedules above the cap",
    ("watch_budget",),
    at_exit=None,
    parameters={
        "ledger": PARAMETERS["ledger"],
        "schedules": Parameter(
            str, "Runs of the schedules, as JSON; `fedemb schedule budget` makes it.", "{}"
        ),
        "alert_below": Parameter(
            float, "Remaining epsilon below which a block is alerted; 0: only above the cap.", 0.0
        ),
    },
)
