"""python docs/pictures/kill_and_resume.py: run the README's first block, and draw what it printed
and trained.

recording.svg is the terminal, of long output its first and last lines. kill_and_resume.svg shows
the ledger."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from drawing import HERE, Drawing

README = HERE.parents[1] / "README.md"
BLOCK = re.compile(r"<!-- run -->\n```bash\n(.*?)```", re.DOTALL)
COLUMNS, FIRST, LAST = 104, 4, 3
LONGEST_PAUSE = 1.0  # seconds: nobody wants to watch the rest
ROW = 17
APPEAR = """
@media screen and (prefers-reduced-motion: no-preference) {
  .line-of-output { animation: appear .1s both }
  @keyframes appear { from { opacity: 0 } }
}
"""


def commands() -> list[str]:
    found = BLOCK.search(README.read_text(encoding="utf-8"))
    assert found
    return found[1].splitlines()


def run(folder: Path) -> list[tuple[float, str]]:
    """What `bash -v` prints: each command as it is read, and its output. With seconds from the
    start.
    """
    script = folder / "script.sh"
    script.write_text("\n".join(commands()) + "\n", encoding="utf-8")
    begun = time.monotonic()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # stepladder's
    with subprocess.Popen(
        ["bash", "-v", script.name],
        cwd=folder, env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as shell:  # fmt: skip
        assert shell.stdout
        lines = [(time.monotonic() - begun, line.rstrip("\n")) for line in shell.stdout]
    print(*(f"{when:6.1f} {line}" for when, line in lines), sep="\n")
    assert shell.returncode == 0, "the last command failed"
    return lines


def shortened(lines: list[tuple[float, str]]) -> Iterator[tuple[float, str, str]]:
    """Seconds, text and look of each line shown."""
    to_come, output = commands(), list[tuple[float, str]]()
    for when, line in [*lines, (lines[-1][0], "")]:
        if (to_come and line == to_come[0]) or (when, line) == (lines[-1][0], ""):
            left_out = output[FIRST:-LAST] if len(output) > FIRST + LAST + 1 else []
            for at, text in output[:FIRST] if left_out else output:
                yield at, text, ""
            if left_out:
                yield left_out[0][0], f"  ({len(left_out)} more lines)", "soft"
                yield from ((at, text, "") for at, text in output[-LAST:])
            output = []
        if to_come and line == to_come[0]:
            yield when, f"$ {to_come.pop(0)}", "bold"
        else:
            output.append((when, line))
    assert not to_come


def recording(lines: list[tuple[float, str]]) -> Drawing:
    shown = list(shortened(lines))
    title = "A run is killed in the middle, goes on with one process instead of two, and ends with the same weights"
    drawing = Drawing(COLUMNS * 7.25 + 32, (len(shown) + 2) * ROW, title, APPEAR)
    clock = last = 0.0
    for row, (when, text, look) in enumerate(shown):
        clock, last = clock + min(LONGEST_PAUSE, max(0.0, when - last)), when
        if text.startswith(("ok:", ' "weights_sha256"')):
            look = "good bold"
        elif " Killed " in text:
            look = "bad"
        cut = text if len(text) <= COLUMNS else f"{text[: COLUMNS - 1]}…"
        drawing.shapes.append(f'<g class="line-of-output" style="animation-delay: {clock:.1f}s">')
        drawing.text(16, (row + 1.7) * ROW, cut, f"mono {look}".strip(), "start")
        drawing.shapes.append("</g>")
    return drawing


def ledger(run_dir: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """By attempt and rank: the steps done when it began, and when it ended."""
    found = {}
    for path in sorted((run_dir / "ledger").iterdir()):
        first, *steps = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        found[first["attempt"], first["rank"]] = (first["resumed_from_step"], steps[-1]["step"])
    return found


def time_line(rows: dict[tuple[int, int], tuple[int, int]], snapshots: int) -> Drawing:
    """Steps from left to right. What was trained after the snapshot that the second attempt began
    with is pale.
    """
    title = "Steps trained by each process before the kill and after it, and which of them are in the weights"
    drawing = Drawing(760, 232, title)
    total, killed, back = max(end for _, end in rows.values()), rows[1, 0][1], rows[2, 0][0]
    left, width, top = 150, 580, 52

    def x(step: float) -> float:
        return left + width * step / total

    for step in range(0, total + 1, snapshots):
        drawing.line(x(step), top - 6, x(step), top + 142, "dashed")
        drawing.text(x(step), top + 158, str(step), "small soft")
    drawing.text(left + width / 2, top + 174, f"steps; a snapshot every {snapshots}", "small soft")
    for row, ((attempt, rank), (begin, end)) in enumerate(sorted(rows.items())):
        y = top + row * 30
        drawing.text(left - 12, y + 15, f"attempt {attempt}, rank {rank}", anchor="end")
        kept = back if attempt == 1 else end
        drawing.box(x(begin), y, x(kept) - x(begin), 22, f"r{rank}")
        if end > kept:
            drawing.box(x(kept), y, x(end) - x(kept), 22, f"r{rank} pale")
    drawing.text(x(killed), top - 30, f"kill -9 after step {killed}", "bad bold")
    drawing.line(x(killed), top - 24, x(killed), top + 58)
    drawing.text(
        x(total) - 8, top + 60 + 15, f"goes on after step {back}, on one process", "small", "end"
    )
    y = top + 108
    drawing.text(left - 12, y + 15, "in the weights", "bold", "end")
    drawing.box(x(0), y, x(back) - x(0), 22, "panel", "by 2 processes")
    drawing.box(x(back), y, x(total) - x(back), 22, "panel", "by 1 process")
    return drawing


def main(folder: Path) -> None:
    with TemporaryDirectory() as made:
        lines = run(Path(made))
        rows = ledger(Path(made) / "runs" / "killed")
    hashes = [line for _, line in lines if "weights_sha256" in line and line not in commands()]
    assert len(hashes) == 2 and hashes[0] == hashes[1], hashes
    assert any(line.startswith("ok: lost 0, repeated 0 (2 attempts") for _, line in lines)
    every = re.search(r"--snapshot-every (\d+)", commands()[0])
    assert every
    (folder / "recording.svg").write_text(recording(lines).svg(), encoding="utf-8")
    (folder / "kill_and_resume.svg").write_text(
        time_line(rows, int(every[1])).svg(), encoding="utf-8"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
