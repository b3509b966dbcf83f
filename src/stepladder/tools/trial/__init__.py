"""Train some steps of a job for a tool: on ranks of this machine, with a listener on each rank."""
