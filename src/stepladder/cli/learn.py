"""`stepladder learn`: show, run and check the lessons and exercises of a checkout."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path
from typing import Annotated

import click

from stepladder.cli.suggest import SuggestingGroup
from stepladder.cli.types import Words
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.numbers import format_count
from stepladder.core.output_file import validate_writable, write_output
from stepladder.core.terminal import make_console
from stepladder.tools.learn.check import (
    NOT_YET_PREFIX,
    Verdict,
    check_item,
    find_missing_requirement,
    find_next_item,
    run_exercise,
    run_lesson,
    watch_saves,
)
from stepladder.tools.learn.class_report import (
    CLASS_PAGE,
    ItemResult,
    make_item_result,
    make_learner_results,
    read_learner_page,
    render_class_page,
    render_learner_page,
)
from stepladder.tools.learn.command import Echo
from stepladder.tools.learn.course import (
    START_COMMAND,
    Course,
    CourseProgress,
    Exercise,
    Lesson,
    load_course,
    load_progress,
    read_source,
)
from stepladder.tools.pages.page import GENERATOR

COMMENT = re.compile("^<!--.*?-->\n", re.MULTILINE)  # read by scripts that make and test pages
SHOWN_LINES = 20


@click.group(cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Take the lessons, from one all_reduce to a cluster, and fix the exercises.

    Without a command, it lists them with your progress.
    """
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@command.command(name="list")
def list_() -> None:
    """List lessons and exercises, with your progress."""
    course, progress = load_course(), load_progress()
    for item in course:
        mark = "[x]" if item.key in progress.passed else "[ ]"
        if isinstance(item, Lesson):
            needs = f"  (needs {', '.join(item.needs)})" if item.needs else ""
            echo(f"{mark} {item.number:2}  {item.title}{needs}")
        else:
            echo(f"        {mark} {item.name:24} {item.title}")
    for kind, items in (("lessons", course.lessons), ("exercises", course.exercises)):
        echo(f"{kind}: {sum(i.key in progress.passed for i in items)} of {len(items)} passed")
    _say_next(course, progress)


def _say_next(course: Course, progress: CourseProgress) -> None:
    """Print the next lesson or exercise."""
    following = find_next_item(course, progress)
    if following is not None:
        name = following.number if isinstance(following, Lesson) else following.name
        echo(f"next: stepladder learn show {name}")


@command.command()
def show(name: str) -> None:
    """Show a lesson's or an exercise's page.

    Args:
        name (N|NAME): Number of a lesson, or name of an exercise.
    """
    course = load_course()
    item = course.find_item(name)
    if course.is_packaged:
        echo(f"first:  {START_COMMAND}")
    if isinstance(item, Lesson):
        echo(f"lesson {item.number}: {item.idea}")
        echo(f"run:    {item.command}")
        for exercise in course.list_exercises(item):
            echo(f"then:   stepladder learn show {exercise.name}")
    elif not course.is_packaged:
        echo(f"edit:   {load_progress().exercise_file(course, item)}")
    page = course.get_item_folder(item) / "README.md"
    echo(f"page:   {page}\n")
    text = COMMENT.sub("", page.read_text(encoding="utf-8"))
    if not sys.stdout.isatty():
        echo(text, end="")
        return
    from rich.markdown import Markdown

    make_console().print(Markdown(text))


@command.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(name: str, args: Words = ()) -> int:
    """Run a lesson, or your file of an exercise, with ARGS, and end with its exit code.

    Args:
        name (N|NAME): Number of a lesson, or name of an exercise.
    """
    course = load_course()
    item = course.find_item(name)
    if isinstance(item, Lesson):
        return run_lesson(course, item, args, echo).exit_code
    file = load_progress().exercise_file(course, item)
    return run_exercise(item, file, args, echo).exit_code


@command.command()
def hint(name: str) -> None:
    """Show a hint for an exercise: one more each time."""
    course, progress = load_course(), load_progress()
    exercise = course.find_exercise(name)
    total = len(exercise.hints)
    shown = min(progress.hints.get(name, 0) + 1, total)
    for number, text in enumerate(exercise.hints[:shown], 1):
        echo(f"{number} of {total}: {text}")
    if shown == total:
        echo(f"No more hints. To see it solved: stepladder learn solution {name} --yes")
    progress.hints[name] = shown
    progress.save()


@command.command()
def check(
    name: str | None = None,
    *,
    check_all: Annotated[bool, "--all"] = False,
    report: Path | None = None,
) -> int:
    """Check a lesson or an exercise by running it.

    Without a name, it checks the next one that you have not passed. A lesson passes if its claim
    holds, an exercise if its check does. Exit code 1 if not.

    Args:
        name ([N|NAME]): Number of a lesson, or name of an exercise.
        check_all: Check every lesson and exercise that this machine can run.
        report (FILE): With --all, write the results as a page, to look at or to hand in. It is
            written after each check, so a check that is stopped leaves an unfinished page.
    """
    course, progress = load_course(), load_progress()
    if name is not None and check_all:
        raise InputError(f"both --all and {name}", f"stepladder learn check {name}")
    if report is not None and not check_all:
        raise InputError("--report without --all", "stepladder learn check --all --report FILE")
    if check_all:
        return _check_course(course, report)
    item = course.find_item(name) if name else find_next_item(course, progress)
    if item is None:
        echo("all passed")
        return 0
    verdict = check_item(course, item, echo)
    _say_verdict(course, item, verdict)
    if verdict.passed:
        _say_next(course, load_progress())
    return int(not verdict.passed)


def _say_verdict(course: Course, item: Lesson | Exercise, verdict: Verdict) -> None:
    """Print whether it passed; if not, why, and what to do."""
    if verdict.passed:
        echo(f"\n{item.key}: passed")
        return
    echo(f"\n{item.key}: NOT YET: {verdict.text}")
    if isinstance(item, Exercise):
        echo(f"edit:   {load_progress().exercise_file(course, item)}")
        echo(f"a hint: stepladder learn hint {item.name}")


@command.command()
def watch() -> None:
    """Check an exercise each time you save its file, until you press Ctrl-C.

    Where one passes, it says which is next.
    """
    course, progress = load_course(), load_progress()
    files = {one: progress.exercise_file(course, one) for one in course.exercises}
    _say_next_exercise(course, files)
    for exercise in watch_saves(files):
        echo(f"\n{exercise.name} was saved: checking it")
        verdict = _check_or_refuse(course, exercise, echo)
        _say_verdict(course, exercise, verdict)
        if verdict.passed:
            _say_next_exercise(course, files)


def _say_next_exercise(course: Course, files: Mapping[Exercise, Path]) -> None:
    """Print which exercise is to be edited next: the first that has not passed."""
    passed = load_progress().passed
    for exercise, file in files.items():
        if exercise.key not in passed and find_missing_requirement(exercise) is None:
            echo(f"waiting until you save {file}")
            echo(f"its page: stepladder learn show {exercise.name}")
            return
    echo("all exercises passed; waiting until you save one")


def _check_course(course: Course, report: Path | None) -> int:
    """Check all lessons and exercises, and return exit code 1 if one does not pass."""
    if report is not None:
        validate_writable(report, "--report", GENERATOR)
    failed = 0
    results: list[ItemResult] = []
    items = list(course)
    for number, item in enumerate(items, 1):
        if report is not None:  # also now, as the check may be stopped half-way
            _write_report(report, results, len(items))
        name = f"lesson {item.number}" if isinstance(item, Lesson) else item.name
        echo(f"{number:2} of {len(items)}  {name:24} ", end="")
        missing = find_missing_requirement(item)
        if missing is not None:
            echo(f"skipped: needs {missing}")
            results.append(make_item_result(item, None, f"needs {missing}"))
            continue
        output: list[str] = []
        verdict = _check_or_refuse(course, item, output.append)
        failed += not verdict.passed
        results.append(make_item_result(item, verdict.passed, verdict.text))
        echo(f"{'passed' if verdict.passed else 'NOT YET'}: {verdict.text}")
        if not verdict.passed and not any(line.startswith(NOT_YET_PREFIX) for line in output):
            echo("".join(f"    {line}\n" for line in output[-SHOWN_LINES:]), end="")
    if report is not None:
        _write_report(report, results, len(items))
    passed = sum(result.passed is True for result in results)
    skipped = len(items) - passed - failed
    echo(f"{passed} of {len(items)} passed, {failed} not yet, {skipped} skipped")
    return int(failed > 0)


def _check_or_refuse(course: Course, item: Lesson | Exercise, echo: Echo) -> Verdict:
    """Check one of many: it does not pass where it is refused, and the others go on."""
    try:
        return check_item(course, item, echo)
    except InputError as error:
        if course.is_packaged:
            raise
        echo(f"{NOT_YET_PREFIX}{error}")
        return Verdict(False, str(error))


def _write_report(report: Path, results: list[ItemResult], num_items: int) -> None:
    """Write the page of the results so far, marked as unfinished if there are more items."""
    learner_results = make_learner_results(results, num_items - len(results))
    write_output(report, render_learner_page(learner_results), "--report")


@command.command(name="class")
def class_(
    reports: tuple[Path, ...], *, output: Annotated[Path, "-o", "--output"] = Path("class.html")
) -> None:
    """Merge the pages of several learners into one: how far each is, and where people are stuck.

    A learner has the name of the account. The host or the file tells two of one name apart.

    Args:
        reports (FILE...): Pages of `learn check --all --report FILE`.
    """
    validate_writable(output, "-o", CLASS_PAGE)
    pages = {path: read_learner_page(path) for path in reports if path != output}
    write_output(output, render_class_page(pages), "-o")
    echo(f"written: {output}")


@command.command()
def solution(name: str, *, yes: bool = False) -> None:
    """Show an exercise's solution.

    Args:
        yes: Show it without asking.
    """
    course = load_course()
    exercise = course.find_exercise(name)
    file = course.get_solution_file(exercise)
    if not yes:
        raise InputError("this shows the whole solution", f"stepladder learn solution {name} --yes")
    text = file.read_text(encoding="utf-8")
    echo(f"# {file}\n\n{text}", end="")
    mine = read_source(load_progress().exercise_file(course, exercise))
    changes = list(unified_diff(mine.splitlines(), text.splitlines(), "yours", name, lineterm=""))
    if changes:
        echo("\n# what it changes in your file\n\n" + "\n".join(changes))


@command.command()
def start(folder: Path = Path("my-exercises")) -> None:
    """Copy the exercises to FOLDER [my-exercises], to work on them there from now on.

    Without a checkout of the repository, this also lays out the lessons, in FOLDER/lessons. Files
    that exist are not changed. To begin an exercise again, remove its exercise.py and repeat this.
    Without `start`, exercises are edited in the checkout.
    """
    course, progress = load_course(), load_progress()
    if course.is_packaged or course.root == progress.course:
        progress.lay_out(course, folder)
        echo(f"{folder / 'lessons'}: {format_count(len(course.lessons), 'lesson')}")
    copied, unchanged = progress.copy_exercises(course, folder)
    copies = format_count(copied, "exercise")
    echo(f"{progress.folder}: {copies} copied, {unchanged} kept as they are")
    _say_next(course, progress)
