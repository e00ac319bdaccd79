"""What every room builds on: sections, YAML, JSON, files, digests, log lines."""
