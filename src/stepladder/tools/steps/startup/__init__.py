"""A folder for PYTHONPATH: each interpreter of a script's ranks runs its sitecustomize."""
