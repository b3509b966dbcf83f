"""A folder for PYTHONPATH: each interpreter of an observed script runs its sitecustomize."""
