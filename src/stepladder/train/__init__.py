"""One training job on the ranks of one process group: the job, the loop, the sum of gradients."""
