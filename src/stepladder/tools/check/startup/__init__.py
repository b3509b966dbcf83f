"""The folder of `sitecustomize`, which is on the ranks' PYTHONPATH."""
