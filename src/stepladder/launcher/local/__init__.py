"""The ranks of one machine, under a launcher that never imports torch."""
