"""The formats that data sets come in."""
