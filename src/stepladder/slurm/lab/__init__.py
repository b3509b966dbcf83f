"""A Slurm cluster on one Linux machine: Debian's daemons, and a network for each node."""
