"""Commands that review and release: runs, results, verify, register, lineage, disclose."""
