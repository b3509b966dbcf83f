"""Looking at a script's optimizer steps from outside."""
