"""Data sets that the package can fetch, with the checksums of their files."""
