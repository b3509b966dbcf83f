"""Tests on several processes, for `pytest_plugin.py`."""
