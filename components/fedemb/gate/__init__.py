"""Gate: the rules that allow or deny a release."""
