"""Check a lesson or an exercise by running it.

A lesson passes if it prints its claim, an exercise if its check prints that it passed.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.errors import InputError
from stepladder.tools.learn.command import CommandResult, Echo, run_command
from stepladder.tools.learn.course import (
    START_COMMAND,
    Course,
    CourseProgress,
    Exercise,
    Lesson,
    extract_check,
    load_progress,
    read_source,
)
from stepladder.tools.learn.hang import HANG_TIMEOUT_S

CLAIM_PREFIX = "claim holds"
PASSED_PREFIX = "passed: "
NOT_YET_PREFIX = "not yet: "
ERROR_PREFIX = "error: "
POLL_S = 0.2


@dataclass(frozen=True)
class Verdict:
    """The result of a check; its text is one line without a full stop."""

    passed: bool
    text: str


def check_item(course: Course, item: Lesson | Exercise, echo: Echo) -> Verdict:
    """Check a lesson or an exercise, and save whether it passed."""
    if isinstance(item, Lesson):
        verdict = check_lesson(course, item, echo)
    else:
        verdict = check_exercise(course, item, load_progress().exercise_file(course, item), echo)
    progress = load_progress()  # only now: another terminal may have changed it during the check
    if verdict.passed:
        progress.passed.add(item.key)
    else:
        progress.passed.discard(item.key)
    progress.save()
    return verdict


def watch_saves(files: Mapping[Exercise, Path]) -> Iterator[Exercise]:
    """Yield each exercise whose file is saved from now on, without an end.

    What is saved while the caller works on an earlier save is seen afterwards, once.
    """
    seen = {exercise: _read_stamp(file) for exercise, file in files.items()}
    while True:
        for exercise, file in files.items():
            stamp = _read_stamp(file)
            if stamp and stamp != seen[exercise]:  # an editor may take the file away as it saves
                seen[exercise] = stamp
                yield exercise
        time.sleep(POLL_S)


def _read_stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes with each save of a file; None where there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def find_next_item(course: Course, progress: CourseProgress) -> Lesson | Exercise | None:
    """Return the first item that has not passed and that this machine can run."""
    for item in course:
        if item.key not in progress.passed and find_missing_requirement(item) is None:
            return item
    return None


def check_lesson(course: Course, lesson: Lesson, echo: Echo) -> Verdict:
    """Run a lesson's command; it passes with exit code 0 and a line that its claim holds."""
    result = run_lesson(course, lesson, (), echo, _get_timeout_s(lesson))
    claim = result.find_last_line(CLAIM_PREFIX)
    if result.failure or not claim:
        error = result.find_last_line(ERROR_PREFIX).removeprefix(ERROR_PREFIX)
        return Verdict(False, error or result.failure or "it did not print its claim")
    return Verdict(True, claim)


def check_exercise(course: Course, exercise: Exercise, file: Path, echo: Echo) -> Verdict:
    """Run the learner's file, whose check must be the shipped one."""
    solution = course.get_solution_file(exercise).read_text(encoding="utf-8")
    if extract_check(read_source(file)) != extract_check(solution):
        restore = f"stepladder learn start {file.parents[1]}"
        if file.is_relative_to(course.root / "lessons"):
            restore = f"git checkout {file}"
        problem = f"the part below `# -- the check` in {file} was changed"
        return Verdict(False, f"{problem}. HINT: mv {file} {file}.old && {restore}")
    result = run_exercise(exercise, file, (), echo, _get_timeout_s(exercise), HANG_TIMEOUT_S)
    success = result.find_last_line(PASSED_PREFIX).removeprefix(PASSED_PREFIX)
    if success and not result.failure:
        return Verdict(True, success)
    reason = result.find_last_line(NOT_YET_PREFIX).removeprefix(NOT_YET_PREFIX)
    return Verdict(False, reason or result.failure or "it ended before its check")


def _get_timeout_s(item: Lesson | Exercise) -> float:
    """Return a timeout that a machine far slower than expected meets, and only a hang exceeds."""
    return 60 + 10 * item.seconds


def find_missing_requirement(item: Lesson | Exercise) -> str | None:
    """Return what a lesson needs and this machine lacks, or None."""
    if isinstance(item, Lesson) and "slurm" in item.needs:
        from slurm_lab import Lab
        from stepladder.slurm.own_lab import LAB_UP_HINT, as_stepladder_error, get_lab_folder

        with as_stepladder_error():
            lab = Lab.load(get_lab_folder())
        return f"Slurm: {LAB_UP_HINT}" if lab is None else None
    return None


def run_lesson(
    course: Course, lesson: Lesson, args: Sequence[str], echo: Echo, timeout_s: float | None = None
) -> CommandResult:
    if course.is_packaged:  # it would write its files into the installed package
        raise InputError(
            "the lessons are still inside the installed package",
            f"{START_COMMAND}, which lays them out",
        )
    command = [*shlex.split(lesson.command), *args]
    # Buffered: otherwise print() writes a line and its end separately, and the lines of several
    # ranks would be mixed. Lessons flush.
    return run_command(command, course.root, echo, timeout_s, PYTHONUNBUFFERED="")


def run_exercise(
    exercise: Exercise,
    file: Path,
    args: Sequence[str],
    echo: Echo,
    timeout_s: float | None = None,
    hang_timeout_s: float | None = None,
) -> CommandResult:
    command = [*exercise.launcher.split(), str(file), *args]
    # Unbuffered: a file that hangs is killed, and would lose its buffered output.
    return run_command(command, file.parent, echo, timeout_s, hang_timeout_s, PYTHONUNBUFFERED="1")
