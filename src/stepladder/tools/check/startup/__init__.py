"""The folder that stands on the ranks' PYTHONPATH."""
