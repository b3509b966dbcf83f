"""What a run is and who computes it, as arithmetic and frozen values. Imports no torch."""
