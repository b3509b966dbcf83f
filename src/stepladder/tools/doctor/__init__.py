"""The check of a machine: facts, gathered once, and rules that judge them. Imports no torch."""
