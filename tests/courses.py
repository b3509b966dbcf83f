"""A small course without torch, as lessons/ has it: a lesson whose claim holds, one without, two
exercises.
"""

from __future__ import annotations

from pathlib import Path

LADDER = """
[[lesson]]
number = 1
folder = "01-first"
title = "First"
idea = "It begins."
command = "python lessons/01-first/lesson.py --flag"
seconds = 1
needs = []
rows = ["C0"]
after = ""

[[lesson]]
number = 2
folder = "02-second"
title = "Second"
idea = "It goes on."
command = "python lessons/02-second/lesson.py"
seconds = 1
needs = ["slurm"]
rows = []
"""

EXERCISES = """
[[exercise]]
name = "add"
lesson = 1
title = "Add"
seconds = 1
reason = "one and one"
hints = ["look", "look closer", "a + b"]

[[exercise]]
name = "stop"
lesson = 2
title = "Stop"
seconds = 1
reason = "it does not stop"
hints = ["look"]
"""

EXERCISE = """
def add(a, b):
    return a

# -- the check: leave it as it is ---
import sys
if add(1, 1) != 2:
    sys.exit(f"not yet: one and one is 2, not {add(1, 1)}")
print("passed: it adds")
"""

ARGUMENTS = "import sys\nprint(sys.argv[1:])\n"


def write_course(root: Path) -> Path:
    """A checkout with this course. Returns `root`."""
    lessons = root / "lessons"
    files = {
        "ladder.toml": LADDER,
        "exercises.toml": EXERCISES,
        "01-first/README.md": "# First\n\n<!-- not run here -->\nRead me.\n",
        "01-first/lesson.py": ARGUMENTS + "print('claim holds: it begins')\n",
        "02-second/README.md": "# Second\n",
        "02-second/lesson.py": "raise SystemExit(3)\n",
    }
    for name, text in {"add": EXERCISE, "stop": EXERCISE}.items():
        files[f"exercises/{name}/README.md"] = (
            f"# {name}\n\nThe file is [exercise.py](exercise.py).\n"
        )
        files[f"exercises/{name}/exercise.py"] = text
        files[f"solutions/{name}.py"] = text.replace("return a\n", "return a + b\n")
    for name, text in files.items():
        (lessons / name).parent.mkdir(parents=True, exist_ok=True)
        (lessons / name).write_text(text)
    return root
