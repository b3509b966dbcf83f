"""A page for a finished run, a view of a running one."""
