"""Lessons and exercises as lessons/ladder.toml and lessons/exercises.toml list them, and the
learner's progress.

The course is part of the repository and of no wheel: it is there to be read and changed.
"""

from __future__ import annotations

import difflib
import json
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
CHECK_LINE = "# -- the check"  # what stands below it is no part of an exercise


@dataclass(frozen=True)
class Lesson:
    """A folder under lessons/. command: runs it from the repository's root. seconds: a guess.

    needs: what a machine may lack: "slurm", or nothing.
    """

    number: int
    folder: str
    title: str
    idea: str
    command: str
    seconds: int
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return self.folder


@dataclass(frozen=True)
class Exercise:
    """A folder under lessons/exercises/. lesson: the number of the lesson it belongs to.

    reason: what its check says as long as nothing was done. hints: each says more than the one
    before."""

    name: str
    lesson: int
    title: str
    seconds: int
    reason: str
    hints: tuple[str, ...]
    launcher: str = "python"

    @property
    def key(self) -> str:
        return self.name


@dataclass(frozen=True)
class Course:
    """root: the repository."""

    root: Path
    lessons: tuple[Lesson, ...]
    exercises: tuple[Exercise, ...]

    def __iter__(self) -> Iterator[Lesson | Exercise]:
        """Lessons in order, each followed by its exercises."""
        for lesson in self.lessons:
            yield lesson
            yield from self.exercises_of(lesson)

    def exercises_of(self, lesson: Lesson) -> list[Exercise]:
        return [exercise for exercise in self.exercises if exercise.lesson == lesson.number]

    def find(self, name: str) -> Lesson | Exercise:
        """A lesson by number or folder, or an exercise by name."""
        for item in self:
            if name == item.key or (
                isinstance(item, Lesson) and name.isdecimal() and int(name) == item.number
            ):
                return item
        near = difflib.get_close_matches(name, [item.key for item in self], 1)
        hint = f"stepladder learn show {near[0]}" if near else "stepladder learn  lists them all"
        raise InputError(f"{name!r} is neither a lesson nor an exercise", hint)

    def find_exercise(self, name: str) -> Exercise:
        found = self.find(name)
        if isinstance(found, Exercise):
            return found
        names = ", ".join(e.name for e in self.exercises_of(found)) or "none"
        raise InputError(f"{name} is a lesson, not an exercise", f"its exercises: {names}")

    def folder(self, item: Lesson | Exercise) -> Path:
        lessons = self.root / "lessons"
        return (
            lessons / item.folder if isinstance(item, Lesson) else lessons / "exercises" / item.name
        )

    def solution(self, exercise: Exercise) -> Path:
        return self.root / "lessons" / "solutions" / f"{exercise.name}.py"


def load_course() -> Course:
    """The course of the checkout around the current folder, or of the one that stepladder was
    installed from.
    """
    own = Path(__file__).parents[4] / LADDER
    inside = Path.cwd().is_relative_to(
        own.parents[1]
    )  # it has this very code, whoever may write there
    ladder = own if inside and own.is_file() else find_file_above(LADDER) or own
    if not ladder.is_file():
        raise InputError(
            f"no folder lessons in {Path.cwd()} or above it; an installed package has none",
            "cd into a checkout of the stepladder repository, and type this again",
        )
    lessons = read(ladder, "lesson", Lesson)
    return Course(
        ladder.parents[1], lessons, read(ladder.with_name("exercises.toml"), "exercise", Exercise)
    )


def read(path: Path, table: str, kind: type[Kind]) -> tuple[Kind, ...]:
    """The file's tables of this name; keys that `kind` does not have serve others."""
    with as_input_error(f"{path} is damaged", f"git checkout {path}", (OSError, ValueError)):
        tables = typed_file.read_toml(path).get(table)
        return tuple(
            typed_file.convert(entry, kind, table)
            for entry in typed_file.convert(tables, list, table)
        )


def part_of_check(text: str) -> str:
    """What stands below an exercise's check line, or "" where that line is gone."""
    return text.partition(CHECK_LINE)[2]


@dataclass
class CourseProgress:
    """passed: keys of lessons and exercises. hints: given so far, by exercise. folder: of the
    learner's copies.
    """

    schema: Literal[1] = 1
    passed: set[str] = field(default_factory=set)
    hints: dict[str, int] = field(default_factory=dict)
    folder: Path | None = None

    def exercise_file(self, course: Course, exercise: Exercise) -> Path:
        """The learner's copy; where `learn start` was never called, the file in the checkout."""
        folder = course.folder(exercise) if self.folder is None else self.folder / exercise.name
        file = folder / "exercise.py"
        if not file.is_file():
            raise InputError(
                f"{file} is not there", f"stepladder learn start {self.folder or 'my-exercises'}"
            )
        return file

    def copy_exercises(self, course: Course, folder: Path) -> tuple[int, int]:
        """Copy them to `folder`, keep what is there. Returns how many were copied, and how many
        kept.
        """
        targets = {
            exercise: folder / exercise.name / "exercise.py" for exercise in course.exercises
        }
        missing = {exercise: target for exercise, target in targets.items() if not target.exists()}
        if place := next(
            filter(None, (find_obstacle(target.parent) for target in missing.values())), None
        ):
            raise InputError(
                f"{folder} cannot be written: {place} is in the way", "name another folder"
            )
        self.save()  # before they are made: there may be no place for it
        for exercise, target in missing.items():
            with as_input_error(f"{target} cannot be written", "name another folder"):
                target.parent.mkdir(parents=True, exist_ok=True)
                durable.write(target, (course.folder(exercise) / "exercise.py").read_bytes())
        self.folder = folder.resolve()
        self.save()
        return len(missing), len(targets) - len(missing)

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
    """As it was saved; nothing passed where it never was."""
    progress = CourseProgress()
    with suppress(FileNotFoundError):
        progress = typed_file.load_json(
            progress.file, CourseProgress, f"rm {progress.file}  (forgets what was passed)"
        )
    return progress
