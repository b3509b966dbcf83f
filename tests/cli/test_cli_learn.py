"""`stepladder learn` at the prompt, on a small course without torch."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import stepladder as package
from courses import write_course
from processes import refused, run, started, wait_until
from stepladder.tools.learn.class_report import (
    LearnerResults,
    name_learners,
    read_learner_page,
    render_learner_page,
)

Learn = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def learn(tmp_path: Path) -> Learn:
    """`stepladder learn ARGS` in a checkout with the small course; no lab is up."""
    checkout = write_course(tmp_path / "checkout")
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    return lambda *args, code=0: expect(run("learn", *args, cwd=checkout, env=env), code)


def expect(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
    assert done.returncode == code, done.stdout + done.stderr
    return done


def solve(tmp_path: Path, name: str = "add") -> None:
    file = tmp_path / "checkout" / "lessons" / "exercises" / name / "exercise.py"
    file.write_text(file.read_text().replace("return a\n", "return a + b\n"))


def test_list_shows_progress_and_what_is_next(learn: Learn, tmp_path: Path) -> None:
    assert learn().stdout.splitlines() == learn("list").stdout.splitlines()
    before = learn().stdout
    assert "[ ]  1  First" in before
    assert "[ ]  2  Second  (needs slurm)" in before
    assert "next: stepladder learn show 1" in before
    learn("check", 1)
    solve(tmp_path)
    learn("check", "add")
    after = learn().stdout
    assert "[x]  1  First" in after
    assert "[x] add" in after
    assert (
        "lessons: 1 of 2 passed\nexercises: 1 of 2 passed\nnext: stepladder learn show stop"
        in after
    )


def test_show_says_what_to_type_and_prints_the_page(learn: Learn) -> None:
    shown = learn("show", 1).stdout
    assert "It begins." in shown
    assert "python lessons/01-first/lesson.py --flag" in shown
    assert "stepladder learn show add" in shown
    assert shown.endswith("# First\n\nRead me.\n")
    assert "lessons/exercises/add/exercise.py" in learn("show", "add").stdout


def test_run_hands_on_arguments_and_the_exit_code(learn: Learn) -> None:
    assert "['--flag', '--nproc', '2', '--help']" in learn("run", 1, "--nproc", 2, "--help").stdout
    learn("run", 2, code=3)
    assert "not yet: one and one is 2, not 1" in learn("run", "add", code=1).stdout


def test_ctrl_c_ends_what_was_run(tmp_path: Path) -> None:
    checkout = write_course(tmp_path)
    waiting = tmp_path / "waiting"
    lesson = checkout / "lessons" / "01-first" / "lesson.py"
    lesson.write_text(
        f"import pathlib, time; pathlib.Path({str(waiting)!r}).write_text('.'); time.sleep(600)\n"
    )
    with started("learn", "run", 1, cwd=checkout) as running:
        running.wait_for(waiting)
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
        assert running.err.read_text().strip() == "stopped"


def test_one_hint_more_each_time(learn: Learn) -> None:
    assert learn("hint", "add").stdout == "1 of 3: look\n"
    assert learn("hint", "add").stdout == "1 of 3: look\n2 of 3: look closer\n"
    last = learn("hint", "add").stdout
    assert last.endswith(
        "3 of 3: a + b\nNo more hints. To see it solved: stepladder learn solution add --yes\n"
    )
    assert learn("hint", "add").stdout == last


def test_check_says_why_not_and_remembers_what_passed(learn: Learn, tmp_path: Path) -> None:
    failed = learn("check", "add", code=1).stdout
    file = tmp_path / "checkout" / "lessons" / "exercises" / "add" / "exercise.py"
    assert failed.endswith(
        "\nadd: NOT YET: one and one is 2, not 1\n"
        f"edit:   {file}\na hint: stepladder learn hint add\n"
    )
    solve(tmp_path)
    assert (
        learn("check", "add").stdout
        == "passed: it adds\n\nadd: passed\nnext: stepladder learn show 1\n"
    )
    assert "[x] add" in learn().stdout


def test_watch_checks_what_is_saved(learn: Learn, tmp_path: Path) -> None:
    checkout = write_course(tmp_path / "checkout")
    file = checkout / "lessons" / "exercises" / "add" / "exercise.py"
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with started("learn", "watch", cwd=checkout, env=env) as running:
        wait_until(lambda: "learn show add" in running.out.read_text(), running.err.read_text)
        file.write_text(file.read_text().replace("return a\n", "return a - b\n"))
        wait_until(lambda: "add: NOT YET" in running.out.read_text(), running.err.read_text)
        file.unlink()  # as an editor may
        file.write_text("def check(): no Python")
        wait_until(lambda: running.out.read_text().count("NOT YET") == 2, running.err.read_text)
        shutil.copy(checkout / "lessons" / "solutions" / "add.py", file)
        wait_until(lambda: "add: passed" in running.out.read_text(), running.err.read_text)
        running.signal_group(signal.SIGINT)
        assert running.end() == 130
    assert "[x] add" in learn("list").stdout


def test_what_passed_and_was_broken_again_is_no_longer_passed(learn: Learn, tmp_path: Path) -> None:
    solve(tmp_path)
    learn("check", "add")
    write_course(tmp_path / "checkout")
    learn("check", "add", code=1)
    assert "[ ] add" in learn().stdout


def test_check_without_a_name_takes_the_next(learn: Learn, tmp_path: Path) -> None:
    assert "claim holds: it begins" in learn("check").stdout
    assert "one and one" in learn("check", code=1).stdout
    solve(tmp_path)
    solve(tmp_path, "stop")
    learn("check")
    learn("check")
    assert learn("check").stdout == "all passed\n"


def test_check_all_skips_what_this_machine_cannot_run(learn: Learn, tmp_path: Path) -> None:
    solve(tmp_path)
    assert learn("check", "--all", code=1).stdout.splitlines() == [
        " 1 of 4  lesson 1                 passed: claim holds: it begins",
        " 2 of 4  add                      passed: it adds",
        " 3 of 4  lesson 2                 skipped: needs Slurm: stepladder lab up --nodes 2",
        " 4 of 4  stop                     NOT YET: one and one is 2, not 1",
        "2 of 4 passed, 1 not yet, 1 skipped",
    ]
    solve(tmp_path, "stop")
    learn("check", "--all")


def test_check_all_shows_what_a_broken_one_said(learn: Learn, tmp_path: Path) -> None:
    broken = tmp_path / "checkout/lessons/01-first/lesson.py"
    broken.write_text("print('so far, so good')\n1 / 0\n")
    output = learn("check", "--all", code=1).stdout
    assert (
        "lesson 1                 NOT YET: it ended with exit code 1, see its output\n    so far, so good\n"
        in output
    )
    assert "    ZeroDivisionError: division by zero\n 2 of 4  add " in output


def test_check_all_is_one_line_where_the_reason_is_followed_by_much(
    learn: Learn, tmp_path: Path
) -> None:
    """Torchrun prints its table of failures after a rank's reason."""
    file = tmp_path / "checkout/lessons/exercises/add/exercise.py"
    file.write_text(
        "import atexit\natexit.register(lambda: print('table\\n' * 30))\n" + file.read_text()
    )
    assert "table" in learn("run", "add", code=1).stdout
    output = learn("check", "--all", code=1).stdout
    assert "add                      NOT YET: one and one is 2, not 1\n 3 of 4  lesson 2" in output


def test_a_lesson_that_lacks_something_says_what(learn: Learn, tmp_path: Path) -> None:
    lesson = tmp_path / "checkout/lessons/01-first/lesson.py"
    lesson.write_text("raise SystemExit('error: no data. HINT: get some')\n")
    failed = learn("check", 1, code=1).stdout
    assert failed.endswith("\n01-first: NOT YET: no data. HINT: get some\n")


def test_a_solution_is_shown_to_who_wants_to_see_it(learn: Learn) -> None:
    line = refused(learn("solution", "add", code=2), "the whole solution")
    assert line.endswith("stepladder learn solution add --yes")
    assert "return a + b" in learn("solution", "add", "--yes").stdout


def test_start_copies_and_check_uses_the_copies(learn: Learn, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    assert f"{copy}: 2 exercises copied, 0 kept" in learn("start", copy).stdout
    file = copy / "add" / "exercise.py"
    file.write_text(file.read_text().replace("return a\n", "return a + b\n"))
    assert "passed: it adds" in learn("check", "add").stdout
    assert f"{copy}: 0 exercises copied, 2 kept" in learn("start", copy).stdout


def test_each_folder_that_is_started_has_the_lessons(tmp_path: Path) -> None:
    """Where the first one has them from the package."""
    first = write_course(tmp_path / "first")
    state = tmp_path / "state" / "stepladder"
    state.mkdir(parents=True)
    (state / "learn.json").write_text(json.dumps({"schema": 1, "course": str(first)}))
    env = {"XDG_STATE_HOME": str(tmp_path / "state")}
    done = expect(run("learn", "start", "second", cwd=tmp_path, env=env), 0)
    assert "second/lessons: 2 lessons\nsecond" in done.stdout.replace(f"{tmp_path}/", "")
    assert (tmp_path / "second/lessons/01-first/lesson.py").is_file()


def test_a_file_in_another_encoding_is_read_or_refused(learn: Learn, tmp_path: Path) -> None:
    solve(tmp_path)
    file = tmp_path / "checkout/lessons/exercises/add/exercise.py"
    text = "# na\u00efve\n" + file.read_text()
    file.write_bytes(text.encode("latin-1"))
    refused(learn("check", "add", code=2), f"{file} is not a Python file", "HINT: save it as UTF-8")
    output = learn("check", "--all", code=1).stdout
    assert f"add                      NOT YET: {file} is not a Python file" in output
    assert " 4 of 4  stop" in output
    file.write_bytes(f"# coding: latin-1\n{text}".encode("latin-1"))
    assert "passed: it adds" in learn("check", "add").stdout


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("show", "ad"), ("'ad'", "stepladder learn show add")),
        (("hint", 1), ("1 is a lesson", "add")),
        (("check", 1, "--all"), ("--all and 1",)),
        (("lern",), ("lern",)),
    ],
    ids=["unknown name", "hint for a lesson", "one and all", "unknown command"],
)
def test_bad_input_is_one_line(
    learn: Learn, args: tuple[object, ...], parts: tuple[str, ...]
) -> None:
    refused(learn(*args, code=2), *parts)


def test_a_package_without_lessons_says_where_they_are(tmp_path: Path) -> None:
    site = tmp_path / "site"
    shutil.copytree(
        Path(package.__file__).parent,
        site / "stepladder",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    done = run("learn", cwd=tmp_path, env={"PYTHONPATH": str(site)})
    refused(done, "no folder lessons", "HINT: cd into a checkout")


def test_listing_imports_no_torch(learn: Learn, tmp_path: Path) -> None:
    code = (
        "import sys; from stepladder.cli import main\n"
        "try: main(['learn', 'show', '1'])\n"
        "except SystemExit as end: sys.exit(end.code or 'torch' in sys.modules)"
    )
    done = run(
        "-c",
        code,
        cwd=tmp_path / "checkout",
        env={"XDG_STATE_HOME": str(tmp_path)},
        command=(sys.executable,),
    )
    assert done.returncode == 0, done.stderr


def test_a_class_hands_in_pages_that_are_merged(learn: Learn, tmp_path: Path) -> None:
    pages = tmp_path / "one.html", tmp_path / "two.html"
    learn("check", "--all", "--report", pages[0], code=1)
    solve(tmp_path)
    learn("check", "--all", "--report", pages[1], code=1)
    first = read_learner_page(pages[0])
    assert [(item.label, item.passed) for item in first.items] == [
        ("lesson 1", True),
        ("add", False),
        ("lesson 2", None),
        ("stop", False),
    ]
    assert first.next_label == "add" and read_learner_page(pages[1]).next_label == "stop"
    other = replace(read_learner_page(pages[1]), learner="<Ada>")
    pages[1].write_text(render_learner_page(other))
    learn("class", *pages, "-o", tmp_path / "class.html")
    learn("class", *tmp_path.glob("*.html"), "-o", tmp_path / "class.html")
    learn("class", *pages, "-o", pages[0], code=2)
    assert read_learner_page(pages[0]).items == first.items, "a learner's page is not replaced"
    text = (tmp_path / "class.html").read_text()
    assert (
        "The class: 2 learners" in text and "<td>&lt;Ada&gt;</td><td>2 of 4</td><td>1</td>" in text
    )
    assert re.findall(r"<td>(stop|add)</td><td>(\d)</td>", text) == [("stop", "2"), ("add", "1")]


def test_a_check_that_is_stopped_leaves_an_unfinished_page(learn: Learn, tmp_path: Path) -> None:
    page = tmp_path / "one.html"
    exercise = tmp_path / "checkout" / "lessons" / "exercises" / "add" / "exercise.py"
    kill = "import os, psutil\npsutil.Process(os.getppid()).kill()\n"
    exercise.write_text(kill + exercise.read_text())
    learn("check", "--all", "--report", page, code=-9)
    results = read_learner_page(page)
    assert [(item.label, item.passed) for item in results.items] == [("lesson 1", True)]
    assert results.state.endswith(", unfinished: 3 not checked")
    assert "1 of 4 passed, 0 skipped" in page.read_text() and results.state in page.read_text()
    learn("class", page, "-o", tmp_path / "class.html")
    assert results.state in (tmp_path / "class.html").read_text()


def test_learners_of_one_name_are_told_apart() -> None:
    results = LearnerResults("student", "today", (), "pc1")
    other = replace(results, host="pc2")
    alone = replace(results, learner="ada")
    pages = {Path("a.html"): results, Path("b.html"): other, Path("c.html"): alone}
    assert list(name_learners(pages)) == ["student on pc1", "student on pc2", "ada"]
    again = {Path("a.html"): results, Path("b.html"): results, Path("c.html"): other}
    assert list(name_learners(again)) == ["student (a.html)", "student (b.html)", "student on pc2"]


def test_a_page_of_something_else_is_refused(learn: Learn, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p data-results='{}'>")
    for name in ("page.html", "no.html"):
        assert str(tmp_path / name) in learn("class", tmp_path / name, code=2).stderr
    assert "--report without --all" in learn("check", "add", "--report", "x", code=2).stderr


def test_a_solution_is_shown_with_what_it_changes(learn: Learn, tmp_path: Path) -> None:
    assert learn("solution", "add", "--yes").stdout.endswith(
        "-    return a\n+    return a + b\n \n # -- the check: leave it as it is ---\n import sys\n"
    )
    solve(tmp_path)
    assert "what it changes" not in learn("solution", "add", "--yes").stdout
