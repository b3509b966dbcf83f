"""python docs/pictures/kill_and_resume.py: run the README's commands that kill a run, and draw what
was trained.

The picture tells one thing: which steps are in the weights of the killed run, and that its weights
have the hash of the run that was never killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from drawing import HERE, Drawing

README = HERE.parents[1] / "README.md"
BLOCK = re.compile(r"```bash\n([^`]*kill -9 [^`]*)```")
# `sleep` waits for a later step here, so that the steps that were lost can be seen in the picture.
SLEEP = """sleep() {
  until grep -qs '"step": 69,' runs/killed/metrics.jsonl; do
    kill -0 $! || exit 1
    command sleep 0.1
  done
  command sleep 0.1
}
"""
TITLE = (
    "A run on two processes is killed with kill -9, resumes on one process, and ends with the hash"
    " of the weights of a run that was never killed"
)
LEFT, WIDTH, ROW = 16, 430, 62


def commands() -> str:
    """Return the README's commands that kill a run and resume it."""
    block = BLOCK.search(README.read_text(encoding="utf-8"))
    assert block
    return block[1]


def run(folder: Path) -> None:
    """Run the commands in `folder`."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # stepladder's
    subprocess.run(
        ["bash", "-c", SLEEP + commands()], cwd=folder, env={**os.environ, "PATH": path}, check=True
    )


def read_attempts(run_dir: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the first and last step of each rank of each attempt, by (attempt, rank)."""
    attempts = {}
    for path in sorted((run_dir / "ledger").iterdir()):
        first, *steps = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        attempts[first["attempt"], first["rank"]] = (first["resumed_from_step"], steps[-1]["step"])
    return attempts


def read_hash(run_dir: Path) -> str:
    """Return the hash of a finished run's weights."""
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    return str(result["weights_sha256"])


def draw(killed: int, resumed: int, total: int, digest: str) -> Drawing:
    """Draw steps from left to right; those that were trained again after the kill are pale.

    Args:
        killed: The last step of the first attempt.
        resumed: The step of the snapshot with which the second attempt began.
        total: The steps of the whole run.
        digest: The hash of both runs' weights.
    """
    drawing = Drawing(LEFT + WIDTH + LEFT, 236, TITLE)

    def x(step: float) -> float:
        return LEFT + WIDTH * step / total

    def bar(row: int, begin: int, end: int, look: str, label: str = "") -> None:
        drawing.box(x(begin), 30 + row * ROW, x(end) - x(begin), 24, look, label)

    def name(row: int, label: str) -> None:
        drawing.text(LEFT, 22 + row * ROW, label, anchor="start")

    def write_hash(row: int) -> None:
        drawing.text(LEFT + WIDTH, 22 + row * ROW, f"{digest[:12]}…", "good bold", "end")

    name(0, "2 processes")
    bar(0, 0, resumed, "r0", f"steps 1 to {resumed}")
    bar(0, resumed, killed, "r0 pale")
    drawing.text(x(killed) + 8, 47, f"kill -9 after step {killed}", "bad bold", "start")
    drawing.line(x(killed), 24, x(killed), 60)
    name(1, "resumed, on 1 process")
    bar(1, resumed, total, "r1", f"steps {resumed + 1} to {total}")
    name(2, "never killed")
    bar(2, 0, total, "r2", f"steps 1 to {total}")
    drawing.text(LEFT + WIDTH, 22, "hash of the weights", "soft", "end")
    for row in (1, 2):
        write_hash(row)
    drawing.text(LEFT + WIDTH, 202, "= the same bits", "good bold", "end")
    text = f"pale: lost with the kill, and trained again after step {resumed}"
    drawing.text(LEFT, 224, text, "soft", "start")
    return drawing


def main(folder: Path) -> None:
    with TemporaryDirectory() as made:
        run(Path(made))
        killed_run, whole_run = (Path(made) / "runs" / name for name in ("killed", "unbroken"))
        attempts = read_attempts(killed_run)
        assert read_hash(killed_run) == read_hash(whole_run)
        (resumed, total), killed = attempts[2, 0], attempts[1, 0][1]
        drawing = draw(killed, resumed, total, read_hash(whole_run))
    (folder / "kill_and_resume.svg").write_text(drawing.svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
