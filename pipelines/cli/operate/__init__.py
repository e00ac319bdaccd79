"""Commands that operate a policy: budget, alerts and retention."""
