"""A folder for PYTHONPATH: its sitecustomize is run by every interpreter that a script's ranks are."""
