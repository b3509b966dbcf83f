"""The back end's import path before it was a package of its own."""

from __future__ import annotations

import subprocess
import sys


def test_the_former_import_path_works_and_names_its_successor() -> None:
    code = (
        "import stepladder.exchange, torch\n"
        "print(torch.distributed.is_backend_available('stepladder'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    [warning] = [line for line in done.stderr.splitlines() if "DeprecationWarning" in line]
    assert warning.endswith(
        "stepladder.exchange is the package stepladder_exchange now: import stepladder_exchange"
    )
