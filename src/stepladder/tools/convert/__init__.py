"""A script for one process becomes one for many, in small steps that are each proved."""
