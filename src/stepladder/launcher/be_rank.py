"""What a rank that is an interpreter of its own runs: the script, and what tells where the rank is.

    python -m stepladder.launcher.be_rank SECONDS file|module NAME ARGS

Its launcher asks it for its stack; where there is none, as under `srun`, a thread looks at the
rank. SECONDS: until that one explains a wait, 0 for its own measure."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

from stepladder.core.world import World
from stepladder.launcher.nodes.self_watch import SelfWatch, watch_itself
from stepladder.launcher.script import Script
from stepladder.rank.error_record import RankError
from stepladder.rank.progress import RankFiles, count_script_steps
from stepladder.rank.stacks import dump_stacks_to_file


def main() -> None:
    seconds, kind, name, *args = sys.argv[1:]
    world = World.detect()
    watch: SelfWatch | None = None
    if (files := RankFiles.of_this_process()) is not None:
        dump_stacks_to_file(Path(files.stacks_file))
    else:
        watch = watch_itself(world, float(seconds) or None)
    threading.Thread(target=count_script_steps, daemon=True).start()

    def show(
        _kind: type[BaseException], error: BaseException, _trace: TracebackType | None
    ) -> None:
        failure = RankError.from_error(world.rank, error)
        if watch is None or not watch.says_who_left(failure):
            print(failure.trace, end="", file=sys.stderr)

    sys.excepthook = show
    Script(name, tuple(args), kind).run_here()


if __name__ == "__main__":
    main()
