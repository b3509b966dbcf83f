"""The probe, which runs inside the ranks of a checked script: it records, and changes no result."""
