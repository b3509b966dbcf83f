"""A real Slurm cluster on one Linux machine: the daemons of Debian's packages, a network for each
node.
"""
