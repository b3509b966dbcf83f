"""Metrics of rankings, and loggers that show the metrics of a run."""
