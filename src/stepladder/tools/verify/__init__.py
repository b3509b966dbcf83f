"""Prove on the user's machine that the number of processes changes nothing, or name the cause."""
