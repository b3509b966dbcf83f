"""Mistakes in batch scripts, found in their text."""
