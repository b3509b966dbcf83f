"""python lessons/make.py diffs|outputs|pictures|slides FILE [NUMBER ...]|notebooks FOLDER|--check

diffs     writes the generated parts of the READMEs: the table of lessons, and for each lesson its
          command, its changes to the lesson that it starts from, and its exercises
outputs   runs each lesson and writes what it printed into its README; with numbers after it, only
          those lessons
pictures  runs the lessons that write numbers, and draws them; needs matplotlib:
          pip install 'stepladder[lessons]'
slides    writes one HTML file of all lessons: text, pictures and output; with numbers after it,
          only those lessons
notebooks writes a notebook for each lesson that starts its processes itself
--check   writes nothing, and fails if `diffs` would change a file
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
from importlib.util import find_spec
from pathlib import Path

import handouts

HERE = Path(__file__).parent
GENERATED = re.compile(
    r"(<!-- generated: (\w+)(?: (\w+) (\d+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
HIDDEN = {"parse_args", "positive"}  # the command line explains nothing about training
CONTEXT_LINES = 2  # before and after a change
FIRST_LINES = 6  # of an output, on a page
LAST_LINES = 6
NEEDED = {"pictures": "matplotlib", "slides": "markdown"}  # by action


# -- lessons and their parts -----------------------------------------------------------------------


@cache
def ladder():
    """Return the lessons by folder in reading order.

    `after` of a lesson is the folder of the lesson that it starts from, or "".
    """
    lessons = tomllib.loads((HERE / "ladder.toml").read_text())["lesson"]
    previous = None
    for lesson in lessons:
        lesson.setdefault("after", previous and previous["folder"])
        previous = lesson
    return {lesson["folder"]: lesson for lesson in lessons}


def code(folder):
    return (HERE / folder / "lesson.py").read_text()


@cache
def pieces(folder):
    """Return the source of each function, class and constant at the top of a lesson, by name."""
    text = code(folder)
    nodes = {name_of(node): node for node in ast.parse(text).body}
    return {name: source_of(text, node) for name, node in nodes.items() if name}


def name_of(node):
    if isinstance(node, ast.Assign):
        return node.targets[0].id
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    return None


def source_of(text, node):
    """Return the lines of a node, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def pieces_before(lesson):
    """Return the pieces that a reader knows before a lesson, each in its latest version.

    The version of the lesson that this one starts from is preferred.
    """
    known = {}
    for folder in ladder():
        if folder == lesson["folder"]:
            break
        known |= pieces(folder)
    return known | pieces_of_start(lesson)


def pieces_of_start(lesson):
    return pieces(lesson["after"]) if lesson["after"] else {}


def changes(lesson):
    """Return the changes that a page explains: {(name, number from 1): lines of a hunk}.

    A piece changes if the reader does not know it, or knows another version. A piece that the
    starting lesson does not have counts as new.
    """
    known = pieces_before(lesson)
    before = pieces_of_start(lesson)
    found = {}
    for name, text in pieces(lesson["folder"]).items():
        if name not in HIDDEN and known.get(name) != text:
            for number, lines in enumerate(find_hunks(before.get(name, ""), text), 1):
                found[name, number] = lines
    return found


def find_hunks(before, after):
    diff = difflib.unified_diff(
        before.splitlines(), after.splitlines(), n=CONTEXT_LINES, lineterm=""
    )
    hunks = []
    for line in list(diff)[2:]:
        if line.startswith("@@"):
            hunks.append([])
        else:
            hunks[-1].append(line.rstrip())
    return hunks


def flags(folder):
    return re.findall(r'add_argument\(\s*"(--\w+)"', code(folder))


# -- generated texts -------------------------------------------------------------------------------


def block(language, lines, mark=""):
    return f"{mark}```{language}\n" + "\n".join(lines) + "\n```\n"


def links(lesson):
    """Return the names that no hunk shows, and the links from a page."""
    text = "".join(f"{title}: `{'`, `'.join(names)}`. " for title, names in unshown(lesson).items())
    text += "The whole file: [lesson.py](lesson.py)."
    exercises = tomllib.loads((HERE / "exercises.toml").read_text())["exercise"]
    names = [entry["name"] for entry in exercises if entry["lesson"] == lesson["number"]]
    if names:
        exercise_links = [f"[{name}](../exercises/{name}/README.md)" for name in names]
        text += f"\n\nExercises: {', '.join(exercise_links)}."
    text += f"\n\nTo check the claim: `stepladder learn check {lesson['number']}`."
    following = "your own job](../../docs/your-own-job.md"
    for entry in ladder().values():
        if entry["number"] == lesson["number"] + 1:
            following = f"{entry['number']}. {entry['title']}](../{entry['folder']}/README.md"
    return f"{text} Next: [{following}).\n"


def unshown(lesson):
    """Return lists of names by title, without empty lists."""
    before = pieces_of_start(lesson)
    now = pieces(lesson["folder"])
    known = pieces_before(lesson)
    from_earlier = [name for name in now if name not in before and known.get(name) == now[name]]
    removed = [name for name in before if name not in now]
    flags_before = flags(lesson["after"] or lesson["folder"])
    lists = {
        "From earlier lessons, unchanged": [name for name in from_earlier if name not in HIDDEN],
        "Gone": [name for name in removed if name not in HIDDEN],
        "New flags": [flag for flag in flags(lesson["folder"]) if flag not in flags_before],
    }
    return {title: names for title, names in lists.items() if names}


def command_of(lesson):
    reason = (
        "tests/lessons runs every lesson by its command in ladder.toml, and this is that command"
    )
    return block("bash", [lesson["command"]], f"<!-- not run here: {reason} -->\n")


def table():
    rows = ["| | lesson | the one new idea |", "| ---: | --- | --- |"]
    for lesson in ladder().values():
        link = f"[{lesson['title']}]({lesson['folder']}/README.md)"
        rows.append(f"| {lesson['number']} | {link} | {lesson['idea']} |")
    return "\n".join(rows) + "\n"


def pages(outputs=None):
    """Return what each README should have, by path.

    outputs has the lines that lessons printed, by folder. Other lessons keep the output that their
    page shows now.
    """
    outputs = outputs or {}
    readmes = {HERE / "README.md": None}
    readmes |= {HERE / folder / "README.md": lesson for folder, lesson in ladder().items()}
    result = {}
    for path, lesson in readmes.items():

        def generate(match, lesson=lesson):
            mark, kind, name, number, current, end = match.groups()
            return mark + generated_text(lesson, kind, name, number, current, outputs) + end

        result[path] = GENERATED.sub(generate, path.read_text())
    return result


def generated_text(lesson, kind, name, number, current, outputs):
    if kind == "table":
        return table()
    if kind == "command":
        return command_of(lesson)
    if kind == "links":
        return links(lesson)
    if kind == "change":
        hunks = changes(lesson)
        no_hunk = ["nothing of this name has changed"]
        return block("diff", hunks.get((name, int(number)), no_hunk))
    if lesson["folder"] in outputs:
        return block("text", outputs[lesson["folder"]])
    return current


# -- commands --------------------------------------------------------------------------------------


def output_of(lesson):
    """Run a lesson in a folder without data, and return its first and last lines."""
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
    # torchrun's ranks are unbuffered: a line and its end are two writes, and another rank may write
    # between them.
    text = re.sub(r"(?<=\w)(?=\[GPU|rank \d+ of)", "\n", text)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if len(lines) <= FIRST_LINES + LAST_LINES + 1:
        return lines
    return [*lines[:FIRST_LINES], "...", *lines[-LAST_LINES:]]


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
    for lesson in choose(numbers):
        write({lesson["folder"]: output_of(lesson)})


def choose(numbers):
    """Return the lessons of these numbers, all without one."""
    lessons = {str(lesson["number"]): lesson for lesson in ladder().values()}
    for number in numbers:
        if number not in lessons:
            refuse(f"{number} is no number of a lesson", f"a number from 1 to {len(lessons)}")
    return [lesson for number, lesson in lessons.items() if not numbers or number in numbers]


def draw():
    import pictures

    for folder, (name, draw_picture) in pictures.PICTURES.items():
        script = HERE / folder / "lesson.py"
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, script, "--folder", runs, *pictures.FLAGS[folder]]
            subprocess.run(command, check=True)
            draw_picture(Path(runs), HERE / folder / name)
        print(f"written: {HERE / folder / name}")


def write_notebooks(folder):
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        refuse(f"{folder} cannot be written: {error.strerror}", "name a path in a folder of yours")
    for lesson in ladder().values():
        if lesson["command"].startswith("python "):  # neither torchrun nor Slurm starts it
            path = folder / f"{lesson['folder']}.ipynb"
            write_handout(path, handouts.make_notebook(lesson))
            for picture in handouts.find_pictures(lesson):
                write_handout(folder / picture.name, picture.read_text(encoding="utf-8"))


def write_handout(path, text):
    if str(path).startswith("-"):
        refuse(f"{path} is no flag of this command", "name a path")
    if path.is_file() and path.read_bytes() != text.encode():
        refuse(f"{path} is there already, with other contents", "remove it, or name a new path")
    try:
        path.write_text(text, encoding="utf-8")
        print(f"written: {path}")
    except OSError as error:
        refuse(f"{path} cannot be written: {error.strerror}", "name a path in a folder of yours")


def refuse(problem, hint):
    print(f"error: {problem}. HINT: {hint}", file=sys.stderr)
    sys.exit(2)


def main():
    needed = NEEDED.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if needed and find_spec(needed) is None:
        refuse(f"{sys.argv[1]} needs {needed}", f"pip install {needed}")
    actions = {"diffs": write, "pictures": draw, "--check": check}
    if sys.argv[1:2] == ["slides"] and len(sys.argv) > 2:
        write_handout(Path(sys.argv[2]), handouts.make_slides(choose(sys.argv[3:])))
    elif sys.argv[1:2] == ["notebooks"] and len(sys.argv) == 3:
        write_notebooks(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["outputs"]:
        run_lessons(sys.argv[2:])
    elif len(sys.argv) == 2 and sys.argv[1] in actions:
        actions[sys.argv[1]]()
    elif sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(__doc__)
    else:
        refuse(f"not understood: {' '.join(sys.argv[1:])}", "python lessons/make.py --help")


if __name__ == "__main__":
    main()
