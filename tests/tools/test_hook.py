"""An observer sees every optimizer step of an unmodified script, however its ranks come about."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import JOBS, run
from stepladder.tools.probe.attach import (
    OBSERVER_VARIABLE,
    STARTUP_FOLDER,
    make_listener_variables,
    temporary_environment,
)

LAUNCHER = """
import sys
from stepladder.cli import main
from eyes import Eyes
from stepladder.tools.probe.attach import make_listener_variables, temporary_environment
with temporary_environment(**make_listener_variables(Eyes, file="seen")):
    main(sys.argv[1:])
"""
EYES = """
import os, pathlib
class Eyes:
    def __init__(self, file):
        self.file, self.kinds = file, []
    def before_step(self, optimizer):
        self.kinds.append("before")
    def after_step(self, optimizer):
        self.kinds.append(type(optimizer).__name__)
        pathlib.Path(self.file + os.environ["RANK"]).write_text(" ".join(self.kinds))
"""


class Eyes:
    """Stands for the one above, which only the ranks can import."""

    def before_step(self, optimizer: object) -> None: ...

    def after_step(self, optimizer: object) -> None: ...


Eyes.__module__ = "eyes"
OWN = "import pathlib; pathlib.Path('own-sitecustomize').touch()"


def in_its_folder(tmp_path: Path, *args: object) -> subprocess.CompletedProcess[str]:
    (tmp_path / "eyes.py").write_text(EYES)
    (tmp_path / "sitecustomize.py").write_text(OWN)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    return run(
        *args, cwd=tmp_path, env={"PYTHONPATH": path}, command=(sys.executable, "-c", LAUNCHER)
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_each_rank_s_steps_are_seen(method: str, tmp_path: Path) -> None:
    script = JOBS / "tutorial.py", 1, 1, "--batch-size", 512
    done = in_its_folder(tmp_path, "run", "--nproc", 2, "--start-method", method, *script)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"seen{rank}").read_text() for rank in range(2)] == [
        "before SGD before SGD"
    ] * 2
    assert (tmp_path / "own-sitecustomize").exists(), "the user's own sitecustomize was run"


def test_a_program_without_torch_notices_nothing(tmp_path: Path) -> None:
    told = (
        "import sys; print(sorted(m for m in sys.modules if m.startswith(('stepladder', 'torch'))))"
    )
    with temporary_environment(**make_listener_variables(Eyes)):
        done = run(cwd=tmp_path, command=(sys.executable, "-c", told))
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


@pytest.mark.slow
def test_an_interpreter_without_the_package_finds_it(tmp_path: Path) -> None:
    (tmp_path / "eyes.py").write_text(EYES)
    lines = (
        "import os, sys",
        "sys.path[:] = [folder for folder in sys.path if not os.path.exists(folder + '/stepladder')]",
        "import torch",
        "p = torch.zeros(2, requires_grad=True); p.sum().backward(); torch.optim.SGD([p]).step()",
    )
    env = {
        "PYTHONPATH": str(STARTUP_FOLDER),
        OBSERVER_VARIABLE: make_listener_variables(Eyes, file="seen")[OBSERVER_VARIABLE],
        "RANK": "0",
    }
    done = run(cwd=tmp_path, env=env, command=(sys.executable, "-c", "\n".join(lines)))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen0").read_text() == "before SGD"


def test_the_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    before = dict(os.environ)
    with temporary_environment(**make_listener_variables(Eyes, file="seen")):
        assert os.environ["PYTHONPATH"] == os.pathsep.join([str(STARTUP_FOLDER), "mine"])
    assert dict(os.environ) == before
