"""Exercise batch-file: the batch file that Slurm accepts, and that never trains.

    python exercise.py          (or: stepladder learn check batch-file)

The job is to run on two nodes, with one torchrun on each. Slurm says nothing, and `stepladder
submit --lint` says a lot."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

JOB = """#!/bin/bash
# SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=TERM@120
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
torchrun --nnodes=2 --nproc_per_node=2 --rdzv-backend=c10d --rdzv-endpoint="$first:29603" train.py
#SBATCH --requeue
"""


# -- the check: leave it as it is ------------------------------------------------------------------


def main():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.sbatch").write_text(JOB, encoding="utf-8")
        Path(folder, "train.py").touch()
        command = [sys.executable, "-m", "stepladder", "submit", "--lint", "job.sbatch"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    print(done.stdout + done.stderr, end="")
    if done.returncode:
        first = done.stdout.partition(". HINT")[0].partition(": ")[2]
        sys.exit(f"not yet: {first}")
    for pattern in ("#SBATCH --nodes=2", "srun .*torchrun", "train.py"):
        if not re.search(pattern, JOB):
            sys.exit(f"not yet: torchrun should run train.py on two nodes; there is no {pattern}")
    print("passed: the lint finds nothing")


if __name__ == "__main__":
    main()
