"""The rules: pure functions from a recording and the source to findings."""
