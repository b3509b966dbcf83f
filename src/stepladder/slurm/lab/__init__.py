"""The former home of the lab, which is the package slurm_lab now; it works for one release.

`from stepladder.slurm.lab.layout import Layout` gives the class of slurm_lab, with a warning.
"""

from __future__ import annotations

import importlib
import sys
import warnings

warnings.warn(
    "stepladder.slurm.lab is the package slurm_lab now: from slurm_lab import Lab, Layout",
    DeprecationWarning,
    stacklevel=2,
)
for _name in ("lab", "layout", "machine", "prepare"):
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"slurm_lab.{_name}")
