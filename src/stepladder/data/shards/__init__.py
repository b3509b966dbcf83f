"""Data sets as chunked HDF5 files: written once, read by index."""
