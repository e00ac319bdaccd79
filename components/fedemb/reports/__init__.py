"""Reports, pages, charts, lineage and headlines."""
