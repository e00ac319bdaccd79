"""Evidence that the planned mechanism is the mechanism that ran."""
