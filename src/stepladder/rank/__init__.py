"""What a rank says of itself: where it is, how it ended, what stopped it. Imports no torch."""
