"""The packages of docs/examples, installed by pip into a folder."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from processes import run

EXAMPLES = Path(__file__).parents[1] / "docs/examples"


def install_example(name: str, folder: Path) -> dict[str, str]:
    """Install a package, and return the variables with which Python finds it."""
    pytest.importorskip("setuptools", minversion="61")
    copy = shutil.copytree(EXAMPLES / name, folder / "source")  # pip builds in the source's folder
    pip = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
    )
    done = run(
        *pip, "--no-build-isolation", "--target", folder / "installed", copy,
        cwd=folder, command=(sys.executable,),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return with_first_on_path(folder / "installed")


def with_first_on_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
