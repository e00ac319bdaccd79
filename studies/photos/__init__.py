"""Private heads and projections on a strong public backbone of photos; see README.md."""
