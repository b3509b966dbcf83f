"""Keeping the files of the user as they are while a script is checked."""
