"""Shared basis of all subpackages: sections, YAML, JSON, files, digests, log lines."""
