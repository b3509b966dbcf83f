"""Looking at runs: a page for a finished one, a view of a running one, times on several sizes."""
