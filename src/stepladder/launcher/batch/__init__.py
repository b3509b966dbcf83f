"""Batch jobs on any cluster: the protocol of a cluster, and the jobs that were submitted."""
