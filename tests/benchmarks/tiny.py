"""Whether a benchmark is to be tiny: `BENCH_TINY=1 make bench` runs each to its last line.

Processes that a benchmark starts inherit it.
"""

import os

TINY = bool(os.environ.get("BENCH_TINY"))
