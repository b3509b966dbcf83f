"""Keeping the files of the user unchanged while a script is checked."""
