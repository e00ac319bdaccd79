"""Commands that review and release: runs, verify, register, lineage."""
