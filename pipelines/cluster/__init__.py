"""Clusters: compiled pipelines, submitted and scheduled runs, approvals, and the doctor."""
