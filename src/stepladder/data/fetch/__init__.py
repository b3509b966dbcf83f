"""Fetching data sets with checksums."""
