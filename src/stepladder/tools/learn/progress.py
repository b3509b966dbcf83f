"""What the learner has passed, how many hints were given, and where the copies are: one small file in the home."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.core.user_folders import state_folder
from stepladder.tools.learn.course import Course, Exercise

SCHEMA = 1


@dataclass
class CourseProgress:
    """passed: keys of lessons and exercises. hints: given so far, by exercise. folder: of the learner's copies."""

    file: Path
    passed: set[str] = field(default_factory=set)
    hints: dict[str, int] = field(default_factory=dict)
    folder: Path | None = None

    def exercise_file(self, course: Course, exercise: Exercise) -> Path:
        """The learner's copy; where `learn start` was never called, the file in the checkout."""
        folder = course.folder(exercise) if self.folder is None else self.folder / exercise.name
        file = folder / "exercise.py"
        if not file.is_file():
            raise InputError(f"{file} is not there", f"stepladder learn start {self.folder or 'my-exercises'}")
        return file

    def save(self) -> None:
        state = {
            "schema": SCHEMA,
            "passed": sorted(self.passed),
            "hints": self.hints,
            "folder": None if self.folder is None else str(self.folder),
        }
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            durable.write(self.file, json.dumps(state, indent=1) + "\n")
        except OSError as error:
            raise InputError(
                f"{self.file} cannot be written: {error.strerror}", "XDG_STATE_HOME=FOLDER stepladder learn ..."
            ) from None


def load_progress() -> CourseProgress:
    """As `learn.json` in the user's state folder has it; nothing passed where there is none."""
    file = state_folder() / "learn.json"
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        if state["schema"] != SCHEMA:
            raise ValueError(f"schema {state['schema']} instead of {SCHEMA}")
        folder = None if state["folder"] is None else Path(state["folder"])
        return CourseProgress(file, set(state["passed"]), dict(state["hints"]), folder)
    except FileNotFoundError:
        return CourseProgress(file)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{file} is damaged: {error}", f"rm {file}  (forgets what was passed)") from None


def copy_exercises(course: Course, progress: CourseProgress, folder: Path) -> tuple[int, int]:
    """Copy the exercises to `folder`, keep what is there. Returns how many were copied, and how many kept."""
    copied = kept = 0
    for exercise in course.exercises:
        target = folder / exercise.name / "exercise.py"
        if target.exists():
            kept += 1
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            durable.write(target, (course.folder(exercise) / "exercise.py").read_bytes())
        except OSError as error:
            raise InputError(f"{target} cannot be written: {error.strerror}", "name another folder") from None
        copied += 1
    progress.folder = folder.resolve()
    progress.save()
    return copied, kept
