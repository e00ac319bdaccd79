"""Sampling, clipping, noise, and the price of what runs."""

from fedemb.foundation.environment import defer_package

# The `__init__` of dp-accounting imports its PLD accountant, which this project does not use, and
# with it SciPy's statistics and signals: half of the start-up time of `fedemb plan`.
defer_package("dp_accounting")
