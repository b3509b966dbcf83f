"""Known error messages, their causes, and what to type."""
