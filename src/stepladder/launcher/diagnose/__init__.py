"""Why ranks make no progress, and why a rank has ended."""
