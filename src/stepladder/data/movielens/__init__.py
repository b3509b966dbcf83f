"""MovieLens: its ratings, its ranking split."""
