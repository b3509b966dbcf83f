"""Measure how much faster a training is on more processes, and explain what limits it."""
