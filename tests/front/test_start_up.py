"""Commands import only what they use."""

import subprocess
import sys

import pytest

PLANNED = "from fedemb.pipelines.cli.main import main; main(['plan', '--config', 'quickstart'])"
UNUSED = ("scipy.stats", "scipy.signal", "dp_accounting.pld", "matplotlib", "kfp")


def printed(script):
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    [
        f"try:\n    {PLANNED}\nexcept SystemExit: pass",
        "import fedemb.ledger.budget",
        "import fedemb.release.privacy_report",
        "import fedemb.release.decide",
    ],
)
def test_planning_and_ledger_import_no_statistics_of_scipy(use):
    loaded = f"print(*[name for name in {UNUSED} if name in sys.modules])"
    assert printed(f"import sys\n{use}\n{loaded}").splitlines()[-1] == ""


def test_ledgers_and_runs_are_read_without_scipy():
    rooms = ("ledger", "pipelines.run.local", "pipelines.cli.review")
    imports = "; ".join(f"import fedemb.{room}" for room in rooms)
    assert printed(f"import sys; {imports}; print('scipy' in sys.modules)").strip() == "False"


def test_deferred_package_is_whole_for_everyone_else():
    script = """
import fedemb.privacy, sys
from dp_accounting import dp_event, rdp
assert "dp_accounting.pld" not in sys.modules
from dp_accounting import PoissonSampledDpEvent, pld
import dp_accounting
assert dp_accounting.pld.PLDAccountant is pld.PLDAccountant
assert dp_accounting.PoissonSampledDpEvent is dp_event.PoissonSampledDpEvent
assert dp_accounting.get_sigma_gaussian(1.0, 1e-5) > 0
assert type(dp_accounting) is type(sys)
try:
    dp_accounting.absent
except AttributeError as error:
    print(error)
"""
    assert "absent" in printed(script)
