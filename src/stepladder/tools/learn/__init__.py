"""The course in lessons/: what it consists of, what was passed, and checking by running."""
