"""Lessons and exercises are checked by running them, and no process of them remains."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil
import pytest

from courses import EXERCISE, write_course
from processes import started, wait_until
from slurm_lab import Lab, Layout
from stepladder.core.errors import InputError
from stepladder.rank.stacks import ABORT_TEXT
from stepladder.slurm.own_lab import get_lab_folder
from stepladder.tools.learn.check import check_exercise, check_lesson, find_missing_requirement
from stepladder.tools.learn.command import run_command
from stepladder.tools.learn.course import Course, load_course, load_progress
from stepladder.tools.learn.hang import StallMeter, explain_output

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=ELSEWHERE)
print(os.getpid(), child.pid, flush=True)
WAIT
"""


def quiet(line: str) -> None:
    pass


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    monkeypatch.chdir(write_course(tmp_path))
    return load_course()


def change(course: Course, name: str, old: str, new: str) -> Path:
    file = course.root / "lessons" / name
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return file


def check_text(course: Course, text: str) -> tuple[bool, str]:
    file = course.root / "mine.py"
    file.write_text(text)
    verdict = check_exercise(course, course.find_exercise("add"), file, quiet)
    return verdict.passed, verdict.text


def test_an_exercise_fails_with_its_reason_and_passes_when_solved(course: Course) -> None:
    assert check_text(course, EXERCISE) == (False, "one and one is 2, not 1")
    assert check_text(course, EXERCISE.replace("return a\n", "return b + a\n")) == (True, "it adds")


def test_an_exercise_that_breaks_is_not_passed(course: Course) -> None:
    assert check_text(course, EXERCISE.replace("return a\n", "return c\n")) == (
        False,
        "it ended with exit code 1, see its output",
    )


def test_an_exercise_that_ends_before_its_check_is_not_passed(course: Course) -> None:
    assert check_text(course, EXERCISE.replace("return a\n", "raise SystemExit\n")) == (
        False,
        "it ended before its check",
    )


def test_the_check_itself_may_not_be_changed(course: Course) -> None:
    changed = EXERCISE.replace("!= 2", "!= 1")
    passed, text = check_text(course, changed)
    assert not passed
    assert "was changed" in text
    exercise = course.find_exercise("add")
    copies = course.root / "mine"
    load_progress().copy_exercises(course, copies)
    for file, restore in (
        (copies / "add" / "exercise.py", f"stepladder learn start {copies}"),
        (course.get_item_folder(exercise) / "exercise.py", "git checkout {file}"),
    ):
        file.write_text(changed)
        hint = f"HINT: mv {file} {file}.old && {restore.format(file=file)}"
        assert check_exercise(course, exercise, file, quiet).text.endswith(hint)


def test_a_lesson_passes_with_its_claim(course: Course) -> None:
    lines: list[str] = []
    verdict = check_lesson(course, course.lessons[0], lines.append)
    assert (verdict.passed, verdict.text) == (True, "claim holds: it begins")
    assert lines == ["['--flag']", "claim holds: it begins"]


def test_a_lesson_s_ranks_write_whole_lines(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many containers set the variable, with which a line and its end are two writes."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code = "import os; print('buffered' if not os.environ['PYTHONUNBUFFERED'] else 'not')\nprint('claim"
    change(course, "01-first/lesson.py", "print('claim", code)
    lines: list[str] = []
    check_lesson(course, course.lessons[0], lines.append)
    assert "buffered" in lines


def test_a_lesson_without_a_claim_or_with_an_exit_code_is_not_passed(course: Course) -> None:
    assert (
        check_lesson(course, course.lessons[1], quiet).text
        == "it ended with exit code 3, see its output"
    )
    change(course, "01-first/lesson.py", "claim holds", "I claim")
    assert check_lesson(course, course.lessons[0], quiet).text == "it did not print its claim"
    change(course, "01-first/lesson.py", "print('I claim", "sys.exit('claim holds")
    assert not check_lesson(course, course.lessons[0], quiet).passed, "a claim and exit code 1"


@pytest.mark.parametrize(
    ("elsewhere", "wait"),
    [
        pytest.param(False, "time.sleep(600)", marks=pytest.mark.slow),
        pytest.param(True, "time.sleep(600)", marks=pytest.mark.slow),
        pytest.param(False, "", marks=pytest.mark.slow),
    ],
    ids=[
        "it hangs",
        "it hangs, with a child in a session of its own",
        "it leaves a child that holds its output",
    ],
)
def test_a_command_that_takes_too_long_is_ended_with_all_below_it(
    tmp_path: Path, elsewhere: bool, wait: str
) -> None:
    code = FAMILY.replace("ELSEWHERE", str(elsewhere)).replace("WAIT", wait)
    ended = run_command([sys.executable, "-c", code], tmp_path, quiet, timeout_s=8)
    assert ended.timed_out
    stacks = ended.output
    pids = [int(pid) for pid in stacks.split("\n")[0].split()]
    assert len(pids) == 2
    assert not wait or (
        "Fatal Python error: Aborted" in stacks and 'File "<string>", line' in stacks
    )
    wait_until(lambda: not [p for p in pids if alive(p)])


HANGS = """
import sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp

def log_loss(rank):
    value = torch.ones(1)
    if rank == 0:
        dist.all_reduce(value)

def run_rank(rank, store):
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    log_loss(rank)
    sys.stdin.read()
    dist.barrier()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (folder + "/store",), nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_a_hang_is_explained_by_the_ranks_lines(course: Course) -> None:
    file = course.root / "mine.py"
    file.write_text(HANGS)
    lines: list[str] = []
    result = run_command([sys.executable, str(file)], course.root, lines.append, None, 10.0)
    assert result.hung and not result.timed_out and "without any work" in result.failure
    assert "Fatal Python error" not in "".join(lines), "the stacks are explained, not shown"
    first = result.explanation.splitlines()[0]
    assert "waits in barrier, called by run_rank(), mine.py:14" in first
    assert "waits in all_reduce, called by log_loss(), mine.py:8" in first
    assert lines[-1] == result.explanation


def faulthandler_text(*frames: str) -> str:
    return "\n".join([ABORT_TEXT, "Current thread 0x1 (most recent call first):", *frames, ""])


def test_who_waits_where_is_read_from_the_stacks() -> None:
    def frame(line: int, function: str, file: str = "/home/me/exercise.py") -> str:
        return f'  File "{file}", line {line} in {function}'

    library = "/lib/site-packages/torch/distributed/distributed_c10d.py"
    root = faulthandler_text(frame(60, "spawn", "/lib/site-packages/torch/x.py"), frame(40, "main"))
    waits = faulthandler_text(frame(3252, "all_reduce", library), frame(8, "evaluate"))
    computes = faulthandler_text(frame(12, "rank_main"))
    printed = f"printed before\n{root}{waits}{computes}"
    text = explain_output(printed, [7, 8, 9], {9: 0, 8: 1}, "nothing has happened", 10)
    assert text.splitlines()[0].startswith(
        "stepladder: nothing has happened for 10 s: rank 0 (pid 9): it is in rank_main()"
    )
    assert "the others wait in all_reduce, called by evaluate(), exercise.py:8" in text
    two = f"{waits}{computes}"
    assert explain_output(two, [7, 8, 9], {}, "", 10) == "", "one of them is no Python"


def test_processes_that_work_do_not_hang() -> None:
    meter = StallMeter(psutil.Process().pid)
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert meter.poll() == 0.0


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no-such-program is not installed\. HINT: "):
        run_command(["no-such-program", "x"], tmp_path, quiet, None)


def test_what_a_lesson_needs(
    course: Course, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    hint = "Slurm: stepladder lab up --nodes 2"
    assert [find_missing_requirement(item) for item in course] == [None, None, hint, None]
    folder = get_lab_folder()
    folder.mkdir(parents=True)
    Lab(Layout(folder, 2, 4, 0, 1000, True, 0, (1, 2, 3), "here", "me")).save()
    assert find_missing_requirement(course.lessons[1]) is None


STARTS = """
import sys
import time
from pathlib import Path
from stepladder.tools.learn.command import run_command

code = "import pathlib, time; pathlib.Path('begun').write_text('x'); time.sleep(600)"
run_command([sys.executable, "-c", code], Path.cwd(), print, None)
"""


def test_what_is_run_ends_with_a_stop(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    with started(command=(sys.executable, "starts.py"), cwd=tmp_path) as running:
        running.wait_for(tmp_path / "begun")
        running.popen.terminate()
        assert running.end() == 143
