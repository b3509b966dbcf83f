"""Why nothing moves, and why a rank ended."""
