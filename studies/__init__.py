"""Studies: users of `fedemb`, beside it and not in its wheel."""
