"""Jobs to run and to copy: each file has a `Config` and `build(config) -> Job`, the form of a
user's own.
"""
