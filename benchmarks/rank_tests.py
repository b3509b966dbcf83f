"""Do tests on ranks cost little, say what failed, and leave nothing? The plugin of pytest:
200 tests of two ranks, the planted failures of tests/tools/planted_on_ranks.py, and random kills.

    python benchmarks/rank_tests.py [--kills N] [--write]
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from report import Report, table

PLANTED = Path(__file__).parents[1] / "tests" / "tools" / "planted_on_ranks.py"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-rA", "--color=no", "-p", "no:cacheprovider"]
MARK = "RANK_TESTS_RUN"
TESTS = 200
SECONDS = 600.0
SECONDS_TO_END = 20.0

GOOD = """
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range({}))
def test_sum(number):
    sums = torch.ones(4)
    dist.all_reduce(sums)
    assert sums[0] == 2
"""

# Each rank has a process of its own beside it. One of them dies at a random moment.
KILLED = """
import os, random, signal, subprocess, time
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", range({}))
def test_killed(number):
    subprocess.Popen(["sleep", "1000"])
    generator = random.Random(number)
    victim = generator.randrange(2)
    wait = generator.random() / 20
    if dist.get_rank() == victim:
        time.sleep(wait)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(torch.ones(1))
"""

HANGS = """
import pathlib, subprocess
import pytest, torch, torch.distributed as dist

@pytest.mark.ranks(2, timeout=5)
def test_hangs():
    subprocess.Popen(["sleep", "1000"])
    pathlib.Path(f"up-{dist.get_rank()}").touch()
    while True:
        dist.all_reduce(torch.ones(1))
"""


def run_pytest(code: str, *flags: str) -> tuple[str, float]:
    """Return what pytest prints about a file of tests, and how long it takes."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_it.py").write_text(code)
        start = time.perf_counter()
        command = [*PYTEST, *flags, "test_it.py"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        return done.stdout, time.perf_counter() - start


def count_right_lines() -> tuple[int, list[list[str]]]:
    """Run the planted failures, and compare the first line of each with its docstring."""
    code = PLANTED.read_text()
    shown, _ = run_pytest(code)
    lines = dict(
        re.findall(
            r"^_+ (?:ERROR at \w+ of )?(test_\w+)\[\d-ranks\] _+\n(.*)$", shown, re.MULTILINE
        )
    )
    rows = []
    right = 0
    for name, expected in re.findall(r'def (test_\w+)\(.*\) -> None:\n    """(.*)"""', code):
        line = lines.get(name, "")
        is_right = re.match(expected, line) is not None
        right += is_right
        rows.append(
            [name.removeprefix("test_").replace("_", " "), line[:160], "yes" if is_right else "no"]
        )
    return right, rows


def processor_seconds() -> float:
    """Return the processor time of all that this process has started and that has ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def import_milliseconds() -> float:
    """Return the median time that pytest needs for the plugin's module."""
    code = (
        "import pytest, time; start = time.perf_counter(); import stepladder.pytest_plugin;"
        " print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", code]
    times = [float(subprocess.check_output(command, text=True)) for _ in range(9)]
    return 1000 * statistics.median(times)


def find_processes(run: str) -> list[psutil.Process]:
    """Return the processes that have this run's variable in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def await_no_process(run: str) -> int:
    """Return how many processes of a run are left after a while."""
    end = time.monotonic() + SECONDS_TO_END
    while (left := find_processes(run)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return len(left)


def kill_ranks(kills: int) -> int:
    """Let one rank of each test die; return how many processes are left of all of them."""
    os.environ[MARK] = "ranks"
    shown, _ = run_pytest(KILLED.format(kills))
    del os.environ[MARK]
    named = len(re.findall(r"^rank \d was killed by SIGKILL", shown, re.MULTILINE))
    print(f"{named} of {kills} kills of ranks named", flush=True)
    return await_no_process("ranks")


def kill_any(kills: int) -> int:
    """Kill any process of a session at a random moment; return how many sessions leave some."""
    generator = random.Random(0)
    leaving = 0
    for number in range(kills):
        run = f"session {number}"
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_it.py").write_text(HANGS)
            pytest = subprocess.Popen(
                [*PYTEST, "test_it.py"],
                cwd=folder,
                env={**os.environ, MARK: run},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            until_ranks = number % 4 > 0
            while until_ranks and len(list(Path(folder).glob("up-*"))) < 1:
                time.sleep(0.01)
            time.sleep(generator.random() * (0.2 if until_ranks else 4))
            family = find_processes(run)
            if family:
                with suppress(psutil.Error):
                    generator.choice(family).kill()
            with suppress(subprocess.TimeoutExpired):
                pytest.wait(60)
            pytest.kill()
            pytest.wait()
        leaving += await_no_process(run) > 0
    return leaving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    report = Report("rank_tests.py", "Tests on ranks", ["torch", "pytest", "stepladder"], "2")
    cost = import_milliseconds()
    used = [processor_seconds()]
    _, one = run_pytest(GOOD.format(1))
    used.append(processor_seconds())
    shown, many = run_pytest(GOOD.format(TESTS + 1))
    used.append(processor_seconds())
    computed = (used[2] - 2 * used[1] + used[0]) / TESTS
    print(
        f"{many - one:.1f} s for {TESTS} tests, each with {computed:.3f} s of processors",
        flush=True,
    )
    passed = f"{TESTS + 1} passed" in shown
    each = (many - one) / TESTS
    right, rows = count_right_lines()
    in_sessions = options.kills // 8
    left = kill_ranks(options.kills - in_sessions)
    leaving = kill_any(in_sessions)
    clean = left == 0 and leaving == 0
    bars = [
        f"- {'PASS' if passed and each <= 0.15 else 'FAIL'}: a test of 2 ranks, beyond the first: {each:.3f} s (bar: <= 0.150 s)",
        f"- {'PASS' if cost <= 20 else 'FAIL'}: a suite that does not use it, for the import of the plugin: {cost:.1f} ms (bar: <= 20 ms)",
        f"- {'PASS' if right == len(rows) else 'FAIL'}: {right} of {len(rows)} planted failures have the right first line (bar: all)",
        f"- {'PASS' if clean else 'FAIL'}: {options.kills} random kills leave {left} processes of ranks, and {leaving} sessions with some (bar: none)",
    ]
    text = (
        f"{options.kills - in_sessions} of the kills are of a rank within a test; {in_sessions} are of any process of a session"
        " (pytest, the server, its guard, a rank, or what a rank has started), a quarter of them before there are ranks."
        f" The first test of a session takes {one:.1f} s, most of it torch's import. A further one uses {computed:.3f} s of processor time in all of its processes."
    )
    report.finish(
        [table(["planted", "first line", "right"], rows), text, "\n".join(bars)], options.write
    )


if __name__ == "__main__":
    main()
