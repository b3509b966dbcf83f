"""Batch jobs for Slurm: checked, rendered, submitted, inspected and requeued."""
