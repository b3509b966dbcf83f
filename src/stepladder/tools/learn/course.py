"""The lessons and exercises listed in lessons/ladder.toml and lessons/exercises.toml, and the
learner's progress.

A checkout has the course in lessons/. A wheel has it inside the package, where nobody should edit
it: `learn start` lays it out in a folder of the learner's.
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import tokenize
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from stepladder.core import durable, typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.folders import find_file_above, find_obstacle, get_state_folder

Kind = TypeVar("Kind")

LADDER = "lessons/ladder.toml"
PACKAGE = Path(__file__).parents[2]  # a wheel has the course in it
START_COMMAND = "stepladder learn start my-course"
CHECK_LINE = "# -- the check"  # learners edit only what is above this line


@dataclass(frozen=True)
class Lesson:
    """A folder under lessons/, with the command that runs it from the repository's root."""

    number: int
    folder: str
    title: str
    idea: str
    command: str
    seconds: int  # an estimate of how long it runs
    needs: tuple[str, ...] = ()  # requirements that a machine may lack: only "slurm" so far

    @property
    def key(self) -> str:
        return self.folder


@dataclass(frozen=True)
class Exercise:
    """A folder under lessons/exercises/."""

    name: str
    lesson: int  # the number of its lesson
    title: str
    seconds: int  # an estimate of how long it runs
    reason: str  # why the unchanged exercise fails its check
    hints: tuple[str, ...]  # from the vaguest to the most precise
    launcher: str = "python"

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True)
class Course:
    """All lessons and exercises of a repository."""

    root: Path  # the folder that has the folder lessons
    lessons: tuple[Lesson, ...]
    exercises: tuple[Exercise, ...]

    @property
    def is_packaged(self) -> bool:
        """Whether this is the course inside the installed package, which nobody should change."""
        return self.root == PACKAGE

    def __iter__(self) -> Iterator[Lesson | Exercise]:
        """Yield the lessons in order, each followed by its exercises."""
        for lesson in self.lessons:
            yield lesson
            yield from self.list_exercises(lesson)

    def list_exercises(self, lesson: Lesson) -> list[Exercise]:
        return [exercise for exercise in self.exercises if exercise.lesson == lesson.number]

    def find_item(self, name: str) -> Lesson | Exercise:
        """Return a lesson by its number or folder, or an exercise by its name."""
        for item in self:
            is_its_number = (
                isinstance(item, Lesson) and name.isdecimal() and int(name) == item.number
            )
            if is_its_number or name == item.key:
                return item
        similar = difflib.get_close_matches(name, [item.key for item in self], 1)
        hint = "stepladder learn"
        if similar:
            hint = f"stepladder learn show {similar[0]}"
        raise InputError(f"{name!r} is neither a lesson nor an exercise", hint)

    def find_exercise(self, name: str) -> Exercise:
        item = self.find_item(name)
        if isinstance(item, Exercise):
            return item
        names = ", ".join(exercise.name for exercise in self.list_exercises(item)) or "none"
        raise InputError(f"{name} is a lesson, not an exercise", f"its exercises: {names}")

    def get_item_folder(self, item: Lesson | Exercise) -> Path:
        lessons = self.root / "lessons"
        if isinstance(item, Lesson):
            return lessons / item.folder
        return lessons / "exercises" / item.name

    def get_solution_file(self, exercise: Exercise) -> Path:
        return self.root / "lessons" / "solutions" / f"{exercise.name}.py"


def load_course() -> Course:
    """Load the course of the folder around the current one that has lessons/.

    Elsewhere, load the course that `learn start` has laid out, that of the checkout from which
    stepladder was installed, or that of the package.
    """
    ladder = _find_ladder()
    if not ladder.is_file():
        raise InputError(
            f"no folder lessons in {Path.cwd()} or above it, and this installation has none",
            "cd into a checkout of the stepladder repository, or pip install stepladder",
        )
    lessons = _read_tables(ladder, "lesson", Lesson)
    exercises = _read_tables(ladder.with_name("exercises.toml"), "exercise", Exercise)
    return Course(ladder.parents[1], lessons, exercises)


def _find_ladder() -> Path:
    """Return the path of ladder.toml, which may not exist."""
    installed = Path(__file__).parents[4] / LADDER
    # The checkout of the running code is trusted whoever may write to it, because its code runs
    # already. find_file_above() validates who owns any other folder.
    is_inside = Path.cwd().is_relative_to(installed.parents[1])
    if is_inside and installed.is_file():
        return installed
    laid_out = load_progress().course
    candidates = [laid_out / LADDER if laid_out else installed, installed, PACKAGE / LADDER]
    existing = (path for path in candidates if path.is_file())
    return find_file_above(LADDER) or next(existing, installed)


def _read_tables(path: Path, name: str, kind: type[Kind]) -> tuple[Kind, ...]:
    """Return the tables of a name in a TOML file; keys that are no field of `kind` are ignored."""
    with as_input_error(f"{path} is damaged", f"git checkout {path}", (OSError, ValueError)):
        tables = typed_file.convert(typed_file.read_toml(path).get(name), list, name)
        return tuple(typed_file.convert(table, kind, name) for table in tables)


def extract_check(text: str) -> str:
    """Return the text below an exercise's check line, or an empty text without such a line."""
    return text.partition(CHECK_LINE)[2]


def read_source(file: Path) -> str:
    """Return a learner's Python file as a text, in the encoding that it names."""
    hint = "save it as UTF-8"
    with (
        as_input_error(f"{file} is not a Python file", hint, (SyntaxError, ValueError)),
        tokenize.open(file) as source,
    ):
        return source.read()


def _find_missing_copies(course: Course, folder: Path) -> dict[Exercise, Path]:
    """Return where to copy the exercises that the folder lacks.

    Raises:
        InputError: Something is in the way.
    """
    targets = {exercise: folder / exercise.name / "exercise.py" for exercise in course.exercises}
    missing = {exercise: target for exercise, target in targets.items() if not target.exists()}
    for target in missing.values():
        obstacle = find_obstacle(target.parent)
        if obstacle is not None:
            reason = os.strerror(errno.EACCES if obstacle.is_dir() else errno.ENOTDIR)
            raise InputError(f"{obstacle} cannot be written: {reason}", "name another folder")
    return missing


@dataclass
class CourseProgress:
    """The learner's progress, which is saved in the state folder."""

    schema: Literal[1] = 1
    passed: set[str] = field(default_factory=set)  # keys of lessons and exercises
    hints: dict[str, int] = field(default_factory=dict)  # shown so far, by exercise
    folder: Path | None = None  # of the learner's copies of the exercises
    course: Path | None = None  # the folder into which the course of a wheel was laid out

    def exercise_file(self, course: Course, exercise: Exercise) -> Path:
        """Return the learner's copy, or without `learn start` the file in the checkout."""
        if self.folder is None and course.is_packaged:
            raise InputError(
                "the exercises are still inside the installed package",
                f"{START_COMMAND}, which lays them out",
            )
        if self.folder is None:
            folder = course.get_item_folder(exercise)
        else:
            folder = self.folder / exercise.name
        file = folder / "exercise.py"
        if not file.is_file():
            raise InputError(
                f"{file} does not exist", f"stepladder learn start {self.folder or 'my-exercises'}"
            )
        return file

    def copy_exercises(self, course: Course, folder: Path) -> tuple[int, int]:
        """Copy the exercises to a folder, but keep existing files.

        Returns how many were copied, and how many kept.
        """
        missing = _find_missing_copies(course, folder)
        self.save()  # first: if the progress cannot be saved, nothing is copied
        for exercise, target in missing.items():
            with as_input_error(f"{target} cannot be written", "name another folder"):
                target.parent.mkdir(parents=True, exist_ok=True)
                durable.write(
                    target, (course.get_item_folder(exercise) / "exercise.py").read_bytes()
                )
        self.folder = folder.resolve()
        self.save()
        return len(missing), len(course.exercises) - len(missing)

    def lay_out(self, course: Course, folder: Path) -> int:
        """Copy the package's course, its pages and pictures into the folder; use it from now on.

        The page of an exercise then links the copy that `copy_exercises` makes in the folder.
        Existing files are kept. Returns how many were copied.
        """
        if (folder / "lessons").exists() and not (folder / LADDER).exists():
            raise InputError(f"{folder / 'lessons'} is not of this course", "name another folder")
        _find_missing_copies(course, folder)  # first: where it raises, nothing is copied
        lessons = (course.root / "lessons").rglob("*")
        pages = (course.root / "docs").rglob("*")
        copied = 0
        # The list of lessons comes first, so that a start that was interrupted can be repeated.
        for file in [course.root / LADDER, *sorted([*lessons, *pages])]:
            target = folder / file.relative_to(course.root)
            if not file.is_file() or file.parent.name == "__pycache__" or target.exists():
                continue
            link = f"(../../../{file.parent.name}/exercise.py)"
            with as_input_error(f"{target} cannot be written", "name another folder"):
                target.parent.mkdir(parents=True, exist_ok=True)
                durable.write(target, file.read_bytes().replace(b"(exercise.py)", link.encode()))
            copied += 1
        self.course = folder.resolve()
        self.save()
        return copied

    @property
    def file(self) -> Path:
        return get_state_folder() / "learn.json"

    def save(self) -> None:
        state = asdict(self) | {"passed": sorted(self.passed)}
        with as_input_error(
            f"{self.file} cannot be written", "XDG_STATE_HOME=FOLDER stepladder learn ..."
        ):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.write(self.file, json.dumps(state, indent=1, default=str) + "\n")


def load_progress() -> CourseProgress:
    """Return the saved progress, or an empty one if none was saved."""
    progress = CourseProgress()
    with suppress(FileNotFoundError):
        progress = typed_file.load_json(
            progress.file, CourseProgress, f"rm {progress.file}  (forgets what was passed)"
        )
    return progress
