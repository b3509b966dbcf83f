"""Starting ranks: on this machine, over SSH, on the nodes of a job. Imports no torch."""
