"""Checking by running: a lesson must come to its claim, an exercise to its check's word."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from stepladder.core.errors import InputError
from stepladder.core.signals import exit_on_signals
from stepladder.rank.lifecycle import die_with_parent
from stepladder.tools.learn.course import (
    Course,
    CourseProgress,
    Exercise,
    Lesson,
    load_progress,
    part_of_check,
)

PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "stepladder": ("-m", "stepladder"),
}
SECONDS_TO_ABORT = 2.0
CLAIM, PASSED, NOT_YET = "claim holds", "passed: ", "not yet: "

Echo = Callable[[str], object]


@dataclass(frozen=True)
class Verdict:
    """text: one line, without a full stop."""

    passed: bool
    text: str


@dataclass(frozen=True)
class CommandResult:
    """timed_out: it was ended by us."""

    code: int
    output: str
    timed_out: bool

    def last_line(self, start: str) -> str:
        """The last that begins so, or nothing."""
        lines = [line.strip() for line in self.output.splitlines()]
        return next((line for line in reversed(lines) if line.startswith(start)), "")

    @property
    def trouble(self) -> str:
        """Why it has not ended well, or nothing."""
        if self.timed_out:
            return "it was ended after a long wait: it hangs, its output says where"
        return f"it ended with exit code {self.code}, see its output" if self.code else ""


def check_item(course: Course, item: Lesson | Exercise, echo: Echo) -> Verdict:
    """Check it, and remember whether it was passed."""
    if isinstance(item, Lesson):
        verdict = check_lesson(course, item, echo)
    else:
        verdict = check_exercise(course, item, load_progress().exercise_file(course, item), echo)
    progress = load_progress()  # after that: it may have changed meanwhile, in another terminal
    (progress.passed.add if verdict.passed else progress.passed.discard)(item.key)
    progress.save()
    return verdict


def next_of(course: Course, progress: CourseProgress) -> Lesson | Exercise | None:
    """The first that was not passed, and that this machine can run."""
    left = (item for item in course if item.key not in progress.passed)
    return next((item for item in left if what_is_missing(item) is None), None)


def check_lesson(course: Course, lesson: Lesson, echo: Echo) -> Verdict:
    """Run the lesson as its command says; it passes if it ends well and says that its claim holds."""
    result = run_lesson(course, lesson, (), echo, seconds_allowed(lesson))
    claim = result.last_line(CLAIM)
    if result.trouble or not claim:
        return Verdict(False, result.trouble or "it did not come to its claim")
    return Verdict(True, claim)


def check_exercise(course: Course, exercise: Exercise, file: Path, echo: Echo) -> Verdict:
    """Run the learner's file, whose check must be the shipped one."""
    solution = course.solution(exercise).read_text(encoding="utf-8")
    if part_of_check(file.read_text(encoding="utf-8")) != part_of_check(solution):
        return Verdict(
            False,
            f"the part below `# -- the check` in {file} was changed: take it from the original",
        )
    result = run_exercise(exercise, file, (), echo, seconds_allowed(exercise))
    passed, reason = (result.last_line(word).removeprefix(word) for word in (PASSED, NOT_YET))
    if passed and not result.trouble:
        return Verdict(True, passed)
    return Verdict(False, reason or result.trouble or "it did not come to its check")


def seconds_allowed(item: Lesson | Exercise) -> float:
    """For a machine that is far slower than the one the guess is for; then it hangs."""
    return 60 + 10 * item.seconds


def what_is_missing(item: Lesson | Exercise) -> str | None:
    """What the lesson needs and is not here now, or None."""
    if isinstance(item, Lesson) and "slurm" in item.needs:
        from stepladder.slurm.lab.lab import LAB_UP_HINT, Lab

        return f"Slurm: {LAB_UP_HINT}" if Lab.load() is None else None
    return None


def run_lesson(
    course: Course, lesson: Lesson, args: Sequence[str], echo: Echo, timeout: float | None = None
) -> CommandResult:
    # Unbuffered, a line and its end are two writes: the ranks' lines would run into each other.
    # Lessons flush.
    return run_command(
        [*shlex.split(lesson.command), *args], course.root, echo, timeout, PYTHONUNBUFFERED=""
    )


def run_exercise(
    exercise: Exercise, file: Path, args: Sequence[str], echo: Echo, timeout: float | None = None
) -> CommandResult:
    # Unbuffered, because a file that hangs is killed, with what it has not written.
    command = [*exercise.launcher.split(), str(file), *args]
    return run_command(command, file.parent, echo, timeout, PYTHONUNBUFFERED="1")


@exit_on_signals()
def run_command(
    command: Sequence[str], cwd: Path, echo: Echo, timeout: float | None, **variables: str
) -> CommandResult:
    """The command to its end, its output (stdout and stderr) line by line to `echo`; nothing of it
    is left.

    variables: of its environment, beside those here.
    """
    program, *args = command
    if program in PROGRAMS:
        command = [sys.executable, *PROGRAMS[program], *args]
    elif shutil.which(program) is None:
        raise InputError(
            f"{program} is not installed", f"it is for: {shlex.join([program, *args])}"
        )
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "PATH": path,
        "PYTHONFAULTHANDLER": "1",
        **variables,
    }
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    overdue = threading.Event()

    def too_late() -> None:
        overdue.set()
        abort(process)
        end(process)

    timer = threading.Timer(timeout or threading.TIMEOUT_MAX, too_late)
    timer.daemon = True
    timer.start()
    lines = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            echo(line.rstrip("\n"))
        return CommandResult(process.wait(), "".join(lines), overdue.is_set())
    finally:
        timer.cancel()
        end(process)
        timer.join()


def members(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """It and all below it, it last."""
    try:
        first = psutil.Process(process.pid)
        return [*first.children(recursive=True), first]
    except psutil.NoSuchProcess:
        return []


def abort(process: subprocess.Popen[str]) -> None:
    """With PYTHONFAULTHANDLER each Python process prints the stacks of its threads and ends."""
    for member in members(process):
        with suppress(psutil.NoSuchProcess):
            if hasattr(member, "rlimit"):  # Linux: leave no core file
                member.rlimit(psutil.RLIMIT_CORE, (0, 0))
            member.send_signal(signal.SIGABRT)
            with suppress(psutil.TimeoutExpired):
                member.wait(
                    SECONDS_TO_ABORT
                )  # one after the other, so that no stack runs into another


def end(process: subprocess.Popen[str]) -> None:
    """Kill it and all below it. torchrun's ranks are in sessions of their own, orphans in its
    group.
    """
    if process.returncode is not None:  # waited for: its number may be another's by now
        return
    for member in members(process):
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
