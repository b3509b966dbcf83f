"""The ranks of one machine, under a parent that never imports torch."""
