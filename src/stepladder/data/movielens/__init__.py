"""MovieLens: its ratings, and the leave-one-out split for ranking."""
