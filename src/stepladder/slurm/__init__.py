"""Batch jobs for Slurm: checked, rendered, submitted, asked after, requeued."""
