"""A script that a cluster may interrupt at any moment, and mistakes that make it lose steps."""

from __future__ import annotations

from pathlib import Path

SCRIPT = Path(__file__).parent / "tools" / "check" / "scripts" / "preempted.py"
HANDLER = "    signal.signal(signal.SIGTERM, ask_to_stop)\n"
AGREED = "            dist.all_reduce(wanted)\n"
SAVED = "                save(epoch, number + 1)\n"
REPLACED = '            os.replace("snapshot.pt.tmp", "snapshot.pt")\n'
RESTORED = '        first, done = snapshot["epoch"], snapshot["done"]\n'
EVALUATED = "        with torch.no_grad():\n"

# By name: what is replaced, and by what. An empty list is the script without a mistake.
KINDS: dict[str, list[tuple[str, str]]] = {
    "right": [],
    "right, stopped by USR1 too": [
        (HANDLER, HANDLER + "    signal.signal(signal.SIGUSR1, ask_to_stop)\n")
    ],
    "right, saves in each step": [(AGREED, AGREED + "            save(epoch, number + 1)\n")],
    "no handler": [(HANDLER, "")],
    "ignores the signal": [(HANDLER, "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n")],
    "ends without saving": [(SAVED, "")],
    "position in the epoch is not saved": [(SAVED, "                save(epoch, 0)\n")],
    "goes on with the next epoch": [(SAVED, "                save(epoch + 1, 0)\n")],
    "counts the last step not": [(SAVED, "                save(epoch, number)\n")],
    "saves over the only snapshot": [('"snapshot.pt.tmp")', '"snapshot.pt")'), (REPLACED, "")],
    "removes the old snapshot before the rename": [
        (
            REPLACED,
            '            os.path.exists("snapshot.pt") and os.remove("snapshot.pt")\n' + REPLACED,
        )
    ],
    "saves elsewhere on the signal": [
        (SAVED, SAVED + '                os.rename("snapshot.pt", f"{dist.get_rank()}.pt")\n')
    ],
    "no handler while it evaluates": [
        (EVALUATED, "        signal.signal(signal.SIGTERM, signal.SIG_DFL)\n" + EVALUATED)
    ],
    "the second resume begins at the first epoch": [
        (RESTORED, RESTORED + "        restarts = snapshot.get('restarts', 0) + 1\n"),
        ("    first, done = 0, 0\n", "    first, done, restarts = 0, 0, 0\n"),
        ('"done": done}', '"done": done, "restarts": restarts}'),
        (
            "    def save(epoch, done):\n",
            "    if restarts > 1:\n        first, done = 0, 0\n\n    def save(epoch, done):\n",
        ),
    ],
    "only rank 0 has a handler": [(HANDLER, '    if os.environ["RANK"] == "0":\n    ' + HANDLER)],
    "a thread still writes when it ends": [
        (
            SAVED,
            "                import threading, time\n"
            "                late = threading.Thread(\n"
            "                    target=lambda: (time.sleep(1), save(epoch, number + 1)), daemon=True\n"
            "                )\n"
            "                late.start()\n",
        )
    ],
}


def write_script(kind: str, folder: Path) -> Path:
    """Write the script with this mistake, and return its path."""
    text = SCRIPT.read_text()
    for old, new in KINDS[kind]:
        assert old in text, f"{kind}: {old!r} is not in {SCRIPT.name}"
        text = text.replace(old, new)
    path = folder / "train.py"
    path.write_text(text)
    return path
