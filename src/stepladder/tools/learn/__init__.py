"""The course in lessons/: its lessons and exercises, the learner's progress, and the checks."""
