"""Run `python -m slurm_lab`, which is the command `slurm-lab`."""

import sys

from slurm_lab.cli import main

sys.exit(main())
