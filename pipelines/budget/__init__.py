"""Budget view of policies: per block spent, reserved, external and remaining, with a forecast."""
