"""How much faster on more processes, and why not more."""
