"""A page that plays back what the ranks of a script did, moment by moment."""
