"""python lessons/make.py diffs|pictures|--check

diffs     writes what is generated in the READMEs: the ladder as a table, each lesson's command, its diff to the
          lesson that it starts from, its exercises
--check   writes nothing, and fails if that is not what the files have
pictures  runs the lessons that leave numbers, and draws them; needs matplotlib: pip install 'stepladder[lessons]'
"""

import ast
import difflib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CONTEXT = 1  # lines around a change


def ladder():
    """The lessons by folder, in reading order, each with `after`: the folder that its diff starts from, or ""."""
    lessons = tomllib.loads((HERE / "ladder.toml").read_text())["lesson"]
    for before, lesson in zip([None, *lessons], lessons, strict=False):
        lesson.setdefault("after", before and before["folder"])
    return {lesson["folder"]: lesson for lesson in lessons}


def code(folder):
    return (HERE / folder / "lesson.py").read_text()


def functions(folder):
    """Source of every function and class at the top of a lesson, by name."""
    text = code(folder)
    named = (ast.FunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(text).body if isinstance(node, named)]
    return {node.name: with_decorators(text, node) for node in nodes}


def with_decorators(text, node):
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def functions_before(lesson):
    """As they were last seen: in the lesson it starts from, else in the nearest one before that has them."""
    known = {}
    for folder in ladder():
        if folder == lesson["folder"]:
            break
        known |= functions(folder)
    return known | (functions(lesson["after"]) if lesson["after"] else {})


def changed(lesson):
    """Names of functions that the lesson has with another text than before."""
    before, now = functions_before(lesson), functions(lesson["folder"])
    return {name for name in before.keys() & now.keys() if before[name] != now[name]}


def block(language, lines, mark=""):
    return f"{mark}```{language}\n" + "\n".join(lines) + "\n```\n"


def diff_of(lesson):
    after, folder = lesson["after"], lesson["folder"]
    if not after:
        return "It starts afresh: the whole file is new.\n" + further(lesson)
    lines = difflib.unified_diff(
        code(after).splitlines(), code(folder).splitlines(),
        f"{after}/lesson.py", f"{folder}/lesson.py", n=CONTEXT, lineterm="",
    )  # fmt: skip
    return block("diff", [line.rstrip() for line in lines]) + further(lesson)


def further(lesson):
    """Where to go from the lesson's page: its file, its exercises, its check, the next lesson."""
    exercises = tomllib.loads((HERE / "exercises.toml").read_text())["exercise"]
    links = [
        f"[{exercise['name']}](../exercises/{exercise['name']}/README.md)"
        for exercise in exercises
        if exercise["lesson"] == lesson["number"]
    ]
    text = "\nThe file: [lesson.py](lesson.py)." + f" Exercises: {', '.join(links)}." * bool(links)
    text += f"\n\nTo check the claim: `stepladder learn check {lesson['number']}`."
    for other in ladder().values():
        if other["number"] == lesson["number"] + 1:
            text += f" Next: [{other['number']}. {other['title']}](../{other['folder']}/README.md)."
    return text + "\n"


def command_of(lesson):
    reason = "tests/lessons runs every lesson by its command in ladder.toml, and this is that command"
    return block("bash", [lesson["command"]], f"<!-- not run here: {reason} -->\n")


def table(lessons):
    rows = ["| | lesson | the one new idea |", "| ---: | --- | --- |"]
    for lesson in lessons.values():
        rows.append(
            f"| {lesson['number']} | [{lesson['title']}]({lesson['folder']}/README.md) | {lesson['idea']} |"
        )
    return "\n".join(rows) + "\n"


def pages():
    """What each README should hold, by path."""
    lessons = ladder()
    makers = {"diff": diff_of, "command": command_of, "table": lambda _: table(lessons)}
    folders = {HERE / "README.md": None} | {HERE / name / "README.md": lesson for name, lesson in lessons.items()}
    return {
        path: GENERATED.sub(lambda m, lesson=lesson: m[1] + makers[m[2]](lesson) + m[3], path.read_text())
        for path, lesson in folders.items()
    }


def check():
    stale = [str(path.relative_to(HERE)) for path, text in pages().items() if path.read_text() != text]
    if stale:
        sys.exit(f"error: not as generated: {', '.join(stale)}. HINT: python lessons/make.py diffs")


def write():
    for path, text in pages().items():
        if path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path}")


def draw():
    import pictures

    for folder, (name, picture) in pictures.PICTURES.items():
        with tempfile.TemporaryDirectory() as runs:
            command = [sys.executable, str(HERE / folder / "lesson.py"), "--folder", runs, *pictures.FLAGS[folder]]
            subprocess.run(command, check=True)
            picture(Path(runs), HERE / folder / name)
        print(f"wrote {HERE / folder / name}")


if __name__ == "__main__":
    actions = {"diffs": write, "pictures": draw, "--check": check}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(__doc__)
    actions[sys.argv[1]]()
