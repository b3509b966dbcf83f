"""python lessons/make.py diffs|outputs|pictures|--check

diffs     writes what is generated in the READMEs: the ladder as a table, each lesson's command, the changes to the
          lesson that it starts from, its exercises
outputs   runs each lesson and writes into its README what it printed; with numbers after it, only those lessons
pictures  runs the lessons that leave numbers, and draws them; needs matplotlib: pip install 'stepladder[lessons]'
--check   writes nothing, and fails if what `diffs` writes is not what the files have
"""

import ast
import difflib
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
GENERATED = re.compile(
    r"(<!-- generated: (\w+)(?: (\w+) (\d+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
HIDDEN = {"parse_args", "positive"}  # the command line says nothing of training
CONTEXT = 2  # lines around a change
FIRST, LAST = 6, 6  # lines of an output that a page shows


@cache
def ladder():
    """The lessons by folder, in reading order, each with `after`: the folder that its diff starts
    from, or "".
    """
    lessons = tomllib.loads((HERE / "ladder.toml").read_text())["lesson"]
    for before, lesson in zip([None, *lessons], lessons, strict=False):
        lesson.setdefault("after", before and before["folder"])
    return {lesson["folder"]: lesson for lesson in lessons}


def code(folder):
    return (HERE / folder / "lesson.py").read_text()


@cache
def pieces(folder):
    """Source of every function, class and constant at the top of a lesson, by name."""
    text = code(folder)
    return {
        name_of(node): with_decorators(text, node) for node in ast.parse(text).body if name_of(node)
    }


def name_of(node):
    if isinstance(node, ast.Assign):
        return node.targets[0].id
    return node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def with_decorators(text, node):
    first = min(
        [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]
    )
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def pieces_before(lesson):
    """As they were last seen: in the lesson it starts from, else in the nearest one before that has
    them.
    """
    known = {}
    for folder in ladder():
        if folder == lesson["folder"]:
            break
        known |= pieces(folder)
    return known | (pieces(lesson["after"]) if lesson["after"] else {})


def changes(lesson):
    """What a page explains: {(name, number from 1): a hunk's lines}, of each piece that is new or
    has changed.

    One that is gone and comes again with another text counts as new.
    """
    known, found = pieces_before(lesson), {}
    before = pieces(lesson["after"]) if lesson["after"] else {}
    for name, text in pieces(lesson["folder"]).items():
        if name not in HIDDEN and known.get(name) != text:
            hunks = hunks_of(before.get(name, ""), text)
            found |= {(name, number): lines for number, lines in enumerate(hunks, 1)}
    return found


def hunks_of(before, now):
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), n=CONTEXT, lineterm="")
    hunks = []
    for line in list(lines)[2:]:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line.rstrip())
    return hunks


def flags(folder):
    return re.findall(r'add_argument\("(--\w+)"', code(folder))


def block(language, lines, mark=""):
    return f"{mark}```{language}\n" + "\n".join(lines) + "\n```\n"


def further(lesson):
    """What no hunk shows, and where to go from the page: its file, its exercises, its check, the
    next lesson.
    """
    before, now = pieces(lesson["after"]) if lesson["after"] else {}, pieces(lesson["folder"])
    known = pieces_before(lesson)
    earlier = [name for name, text in now.items() if name not in before and known.get(name) == text]
    flags_before = flags(lesson["after"] or lesson["folder"])
    lists = {
        "From earlier lessons, unchanged": [name for name in earlier if name not in HIDDEN],
        "Gone": [name for name in before if name not in now and name not in HIDDEN],
        "New flags": [flag for flag in flags(lesson["folder"]) if flag not in flags_before],
    }
    text = "".join(f"{word}: `{'`, `'.join(names)}`. " for word, names in lists.items() if names)
    exercises = tomllib.loads((HERE / "exercises.toml").read_text())["exercise"]
    links = [
        f"[{exercise['name']}](../exercises/{exercise['name']}/README.md)"
        for exercise in exercises
        if exercise["lesson"] == lesson["number"]
    ]
    text += (
        "The whole file: [lesson.py](lesson.py)."
        + f"\n\nExercises: {', '.join(links)}." * bool(links)
    )
    text += f"\n\nTo check the claim: `stepladder learn check {lesson['number']}`."
    for other in ladder().values():
        if other["number"] == lesson["number"] + 1:
            text += f" Next: [{other['number']}. {other['title']}](../{other['folder']}/README.md)."
    return text + "\n"


def command_of(lesson):
    reason = (
        "tests/lessons runs every lesson by its command in ladder.toml, and this is that command"
    )
    return block("bash", [lesson["command"]], f"<!-- not run here: {reason} -->\n")


def table(lessons):
    rows = ["| | lesson | the one new idea |", "| ---: | --- | --- |"]
    for lesson in lessons.values():
        rows.append(
            f"| {lesson['number']} | [{lesson['title']}]({lesson['folder']}/README.md) | {lesson['idea']} |"
        )
    return "\n".join(rows) + "\n"


def pages(outputs=None):
    """What each README should hold, by path. outputs: by folder; without them what the page shows
    now stays.
    """
    lessons = ladder()

    def generated(match, lesson):
        mark, what, name, number, now, end = match.groups()
        if what == "change":
            text = block(
                "diff",
                changes(lesson).get((name, int(number)), ["nothing of this name has changed"]),
            )
        elif what == "output":
            text = (
                block("text", outputs[lesson["folder"]])
                if lesson["folder"] in (outputs or {})
                else now
            )
        else:
            text = {"links": further, "command": command_of, "table": lambda _: table(lessons)}[
                what
            ](lesson)
        return mark + text + end

    folders = {HERE / "README.md": None} | {
        HERE / name / "README.md": lesson for name, lesson in lessons.items()
    }
    return {
        path: GENERATED.sub(lambda match, lesson=lesson: generated(match, lesson), path.read_text())
        for path, lesson in folders.items()
    }


def output_of(lesson):
    """What the lesson prints, from a folder without data: its first and last lines."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lessons").symlink_to(HERE.resolve())
        done = subprocess.run(
            shlex.split(lesson["command"]),
            cwd=folder,
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path, "PYTHONUNBUFFERED": ""},
        )
    if done.returncode:
        sys.exit(f"{lesson['command']}\n{done.stderr}")
    text = done.stdout.replace(socket.gethostname(), "HOST")
    # torchrun's ranks are unbuffered: a line and its end are two writes, and another rank may come
    # between.
    text = re.sub(r"(?<=\w)(?=\[GPU|rank \d+ of)", "\n", text)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return lines if len(lines) <= FIRST + LAST + 1 else [*lines[:FIRST], "...", *lines[-LAST:]]


def check():
    stale = [
        str(path.relative_to(HERE)) for path, text in pages().items() if path.read_text() != text
    ]
    if stale:
        sys.exit(f"error: not as generated: {', '.join(stale)}. HINT: python lessons/make.py diffs")


def write(outputs=None):
    for path, text in pages(outputs).items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")


def run_lessons(numbers):
    for folder, lesson in ladder().items():
        if not numbers or str(lesson["number"]) in numbers:
            write({folder: output_of(lesson)})


def draw():
    import pictures

    for folder, (name, picture) in pictures.PICTURES.items():
        with tempfile.TemporaryDirectory() as runs:
            command = [
                sys.executable,
                str(HERE / folder / "lesson.py"),
                "--folder",
                runs,
                *pictures.FLAGS[folder],
            ]
            subprocess.run(command, check=True)
            picture(Path(runs), HERE / folder / name)
        print(f"wrote {HERE / folder / name}")


if __name__ == "__main__":
    actions = {"diffs": write, "pictures": draw, "--check": check}
    if sys.argv[1:2] == ["outputs"]:
        run_lessons(sys.argv[2:])
    elif len(sys.argv) == 2 and sys.argv[1] in actions:
        actions[sys.argv[1]]()
    else:
        sys.exit(__doc__)
