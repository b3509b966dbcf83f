"""Data sets: the catalogue, fetching with checksums, and readers."""
