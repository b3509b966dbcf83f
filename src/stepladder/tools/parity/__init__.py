"""Parity: whether a script computes the same on one process and on several."""
