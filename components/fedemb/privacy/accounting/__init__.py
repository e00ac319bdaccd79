"""Privacy accounting of DP events."""
