"""Why ranks waited, from the dumps of torch's flight recorder."""

from __future__ import annotations

import re
from pathlib import Path

from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.flight_recorder import infer_progress, read_dump
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import RankStatus

MAX_DUMP_BYTES = 1 << 28
DUMP_STARTS = (b"\x80", b"{")  # of a pickle, and of JSON


def explain_dumps(path: Path) -> Explanation | None:
    """Return why ranks waited, from the dump of one rank and those beside it.

    Args:
        path: A file whose name ends in the number of its rank, as torch writes it. The files beside
            it that have another number are the dumps of the other ranks.

    Returns:
        The explanation; None if the file is no dump.

    Raises:
        ValueError: A file beside it is no dump.
    """
    name = re.fullmatch(r"(.*?)(\d+)", path.name)
    if name is None or not path.is_file() or path.stat().st_size > MAX_DUMP_BYTES:
        return None
    with path.open("rb") as file:
        if not file.read(1).startswith(DUMP_STARTS):
            return None
    try:
        read_dump(path)
    except ValueError:
        return None
    dumps = {
        int(match[1]): read_dump(sibling)
        for sibling in path.absolute().parent.iterdir()
        if (match := re.fullmatch(rf"{re.escape(name[1])}(\d+)", sibling.name))
    }
    progress = infer_progress(dumps)
    if not progress:
        return None
    return explain_hang([RankStatus(rank, 0, progress=progress[rank]) for rank in sorted(progress)])
