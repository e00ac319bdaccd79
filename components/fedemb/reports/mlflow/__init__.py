"""Runs in MLflow: parameters, metrics, tags and artifacts of a run, of public values only."""
