"""Findings of all tools that look for mistakes: one form, one kind of text, one renderer."""
