"""`@pytest.mark.ranks(2)`: a test on several processes is one test, and says which rank failed."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import planted_on_ranks
import pytest
import torch

from pages import REPOSITORY
from processes import run
from stepladder.testing import assert_parity

pytestmark = pytest.mark.ranks

PLANTED = Path(planted_on_ranks.__file__)
# Those that take a second each.
QUICK = "one_rank or all_alike or two_of_three or exits or killed or values_differ or in_setup"

GOOD = """
import pytest, torch, torch.distributed as dist
from stepladder.testing import assert_same_on_ranks

@pytest.fixture(scope="module")
def shared():
    yield
    open("ended", "a").write("x")

def test_before(shared):
    torch.ones(2000, 2000).sum()  # in threads, after which a fork would hang

@pytest.mark.ranks(2, 3)
def test_sum(comm, tmp_path, shared):
    sums = torch.ones(2)
    dist.all_reduce(sums)
    assert_same_on_ranks(sums)
    assert sums[0] == comm.world.world_size == dist.get_world_size()
    (torch.ones(2000, 2000) @ torch.ones(2000, 2)).sum()

@pytest.mark.ranks(1, exchange="gloo")
def test_alone(comm, num_ranks):
    assert comm.world.world_size == num_ranks == 1

@pytest.mark.ranks(2)
@pytest.mark.xfail(strict=True)
def test_expected(comm):
    assert comm.world.rank == 0

@pytest.mark.ranks(2)
def test_skipped(comm):
    pytest.skip("everywhere")

def test_comm_without_ranks(comm):
    pass

@pytest.mark.ranks  # of a suite that has a marker and a parameter of these names
@pytest.mark.parametrize("num_ranks", [5])
def test_of_another_suite(num_ranks):
    assert num_ranks == 5 and not dist.is_initialized()
"""


def run_pytest(folder: Path, *arguments: object) -> str:
    """Return what pytest prints about the tests in a folder."""
    command = (sys.executable, "-m", "pytest", "-rA")  # which loads it by its entry point
    flags = ("-p", "no:cacheprovider", "--color=no")
    return run(*flags, *arguments, cwd=folder, command=command).stdout


def first_lines(output: str) -> dict[str, str]:
    """Return the first line of each failure, by the name of the test."""
    pattern = r"^_+ (?:ERROR at \w+ of )?(test_\w+)\[\d-ranks\] _+\n(.*)$"
    return dict(re.findall(pattern, output, re.MULTILINE))


def find_wrong_lines(output: str, names: str = "") -> list[str]:
    """Return the planted failures whose first line is not the one of their docstring."""
    lines = first_lines(output)
    wrong = []
    for name, function in vars(planted_on_ranks).items():
        if name.startswith("test_") and (not names or name.removeprefix("test_") in names.split()):
            expected = function.__doc__
            if not re.match(expected, lines.get(name, "")):
                wrong.append(f"{name}: {lines.get(name)!r}, not {expected!r}")
    return wrong


def test_a_suite_that_does_not_use_it_imports_nothing() -> None:
    code = "import sys, stepladder.pytest_plugin; print([n for n in sys.modules if 'step' in n or n == 'torch'])"
    done = run("-c", code, cwd=Path("/"), command=(sys.executable,))
    assert done.stdout.strip() == "['stepladder', 'stepladder.pytest_plugin']"


def test_a_marked_test_runs_once_on_so_many_processes(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text(GOOD)
    shown = run_pytest(tmp_path, "-q")
    assert re.search(r"5 passed, 1 skipped, 1 xfailed, .*1 error", shown), shown
    assert "the fixture comm needs @pytest.mark.ranks(2)" in shown
    page = (REPOSITORY / "docs" / "rank-tests.md").read_text()
    (tmp_path / "test_good.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    assert "2 passed" in run_pytest(tmp_path, "-q")
    (tmp_path / "test_good.py").write_text(GOOD)
    assert "2 passed, 6 deselected" in run_pytest(tmp_path, "-q", "-k", "3-ranks or before")


def test_the_first_line_says_which_rank_failed(tmp_path: Path) -> None:
    shutil.copy(PLANTED, tmp_path / "test_planted.py")
    shown = run_pytest(tmp_path, "-k", QUICK)
    assert find_wrong_lines(shown, QUICK) == [], shown
    assert shown.count("def test_one_rank(comm: Comm)") == 1, "one traceback"
    assert re.search(r"^FAILED \S+one_rank\S+ - rank 1 of 2 failed: assert 1", shown, re.MULTILINE)
    assert "1 failed" in run_pytest(tmp_path, "-x", "-k", "one_rank or all_alike")


def test_a_wrong_marker_is_one_line(tmp_path: Path) -> None:
    calls = ["0", "'2'", "2, timout=3", "2, exchange='nccl'"]
    for number, call in enumerate(calls):
        code = f"import pytest\n@pytest.mark.ranks({call})\ndef test_it(): pass"
        (tmp_path / f"test_wrong_{number}.py").write_text(code)
    shown = run_pytest(tmp_path, "-q")
    refused = re.findall(
        r"^@pytest\.mark\.ranks with (.+)\. HINT: ranks\(2, 4", shown, re.MULTILINE
    )
    assert refused == ["0", "'2'", "'timout'", "'exchange'"], shown


@pytest.mark.slow
def test_parity_with_one_process() -> None:
    def mean(comm: object) -> torch.Tensor:
        total = torch.arange(8.0)[comm.world.rank :: comm.world.world_size].sum()  # type: ignore[attr-defined]
        comm.all_reduce(total).wait()  # type: ignore[attr-defined]
        return total / 8

    assert_parity(mean, ranks=2)
    with pytest.raises(AssertionError, match=r"rank 1 of 2 and one process differ: Scalars"):
        assert_parity(lambda comm: comm.world.rank)
