"""Proves on the user's own machine that the number of processes changes nothing, or says what does."""
