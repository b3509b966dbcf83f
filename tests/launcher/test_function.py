"""Ranks from Python and from a notebook's cell."""

from __future__ import annotations

import os
import shutil
import sys
import types
from pathlib import Path

import pytest

import stepladder
from notebooks import connect_by_files
from processes import SECONDS, run
from stepladder.core.errors import InputError
from stepladder.launcher.function import RankFailed, launch

pytestmark = pytest.mark.ranks


class Refused(Exception):
    """One that only this module knows."""


def by_rank(values: list[str]) -> str:
    print("here", os.environ["RANK"])
    return values[int(os.environ["RANK"])] + os.environ["WORLD_SIZE"]


def remove_folder(folder: str) -> str:
    shutil.rmtree(folder)
    return "a value"


def return_what_only_a_rank_has() -> object:
    module = types.ModuleType("only_there")
    sys.modules["only_there"] = module
    exec("class Value: pass", module.__dict__)
    module.__file__ = __file__
    return module.Value()


def test_values_come_back_in_rank_order_and_prints_appear(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert (
        stepladder.launcher is sys.modules["stepladder.launcher"]
    )  # the package, which can be called
    assert stepladder.launch(by_rank, ["a", "b"], nproc=2) == ["a2", "b2"]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 0] here 0", "[rank 1] here 1"]


@pytest.mark.slow
def test_a_closure_travels_and_an_exception_comes_back_with_its_rank_and_traceback() -> None:
    limit = 1

    def fails() -> None:
        if int(os.environ["RANK"]) >= limit:
            raise KeyError("the cause")

    with pytest.raises(RankFailed, match="rank 1 failed: KeyError: 'the cause'") as raised:
        launch(fails, nproc=2)
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, KeyError)
    assert str(raised.value).count("Traceback") == 1 and "in fails" in str(raised.value)


@pytest.mark.slow
def test_bad_input_and_an_early_end_are_told_apart() -> None:
    def refuses() -> None:
        raise InputError("what was found", "what to type")

    with pytest.raises(InputError, match="what was found"):
        launch(refuses)
    with pytest.raises(RankFailed, match="rank 0 ended with exit code 3"):
        launch(lambda: os._exit(3))
    with pytest.raises(InputError, match="'none' is not a number of processes"):
        launch(print, nproc="none")
    with pytest.raises(InputError, match="--nproc 1000000 on a machine"):
        launch(print, nproc=10**6)


@pytest.mark.slow
def test_a_value_does_not_depend_on_the_temporary_directory_and_its_class_has_to_be_there(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary directory is gone when the function has its value."""
    (temporary := short_folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert launch(remove_folder, str(temporary)) == ["a value"]
    assert not temporary.exists()
    with pytest.raises(ModuleNotFoundError, match="only_there"):
        launch(return_what_only_a_rank_has)


@pytest.mark.slow
def test_ctrl_c_in_the_caller_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "caller.py").write_text(
        "import os, signal, threading, time, stepladder\n"
        "def holds():\n"
        "    open('aside-' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "    os.rename('aside-' + os.environ['RANK'], 'at-' + os.environ['RANK'])\n"
        "    time.sleep(1000)\n"
        "def interrupt():\n"
        "    while not (os.path.exists('at-0') and os.path.exists('at-1')): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "try:\n"
        "    stepladder.launch(holds, nproc=2)\n"
        "except KeyboardInterrupt:\n"
        "    pids = [int(open(f'at-{rank}').read()) for rank in (0, 1)]\n"
        "    for _ in range(3000):\n"
        "        if not any(os.path.exists(f'/proc/{pid}') for pid in pids): print('gone'); break\n"
        "        time.sleep(0.1)\n"
    )
    done = run("caller.py", cwd=tmp_path, command=(sys.executable,))
    assert done.stdout == "gone\n", done.stderr


NOTEBOOK = """
import os, stepladder, torch
torch.ones(500, 500) @ torch.ones(500, 500)   # a process that has run torch: nothing may be forked from it
scale = 2.0
---
def total(x):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    value = torch.tensor(x * scale * (dist.get_rank() + 1))
    dist.all_reduce(value)
    print("rank", dist.get_rank(), "has", value.item())
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()
    return value.item()

stepladder.launch(total, 3.0, nproc=2)
---
try:
    stepladder.launch(lambda: 1 / 0, nproc=2)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_notebook_s_cells_are_ranks(tmp_path: Path, short_folder: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    cells = [nbformat.v4.new_code_cell(text.strip()) for text in NOTEBOOK.split("---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(
        notebook,
        config=connect_by_files(short_folder),
        timeout=SECONDS,
        startup_timeout=SECONDS,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [list(cell.outputs) for cell in notebook.cells]
    assert outputs[1][-1]["data"]["text/plain"] == "[18.0, 18.0]"
    assert "[rank 1] rank 1 has 18.0" in "".join(o.get("text", "") for o in outputs[1])
    assert "ZeroDivisionError" in "".join(o.get("text", "") for o in outputs[2])
