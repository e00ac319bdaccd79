"""Gate: the plan of a run, and the rules that allow or deny its release."""
