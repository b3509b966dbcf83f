"""The program of a rank that is a new interpreter: it runs the script and monitors the rank.

    python -m stepladder.launcher.rank_main SECONDS file|module NAME ARGS

A launcher of ours asks the rank for its stack. Without one, as under `srun`, a thread monitors the
rank. SECONDS is the time until that thread explains a wait, 0 for the default.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

from stepladder.core.world import World
from stepladder.launcher.nodes.self_monitor import SelfMonitor, start_self_monitor
from stepladder.launcher.script import Script
from stepladder.rank.error_record import RankError
from stepladder.rank.progress import RankFiles, count_script_steps
from stepladder.rank.stacks import answer_stack_signal


def main() -> None:
    """Run the script that the command line names."""
    seconds, kind, name, *args = sys.argv[1:]
    world = World.detect()
    monitor: SelfMonitor | None = None
    files = RankFiles.of_this_process()
    if files is not None:
        answer_stack_signal(Path(files.stacks_file))
    else:
        monitor = start_self_monitor(world, float(seconds) or None)
    threading.Thread(target=count_script_steps, daemon=True).start()

    def print_error(
        _kind: type[BaseException], error: BaseException, _trace: TracebackType | None
    ) -> None:
        failure = RankError.from_error(world.rank, error)
        if monitor is None or not monitor.reports_early_exit(failure):
            print(failure.full_trace, end="", file=sys.stderr)

    sys.excepthook = print_error
    Script(name, tuple(args), kind).run_here()


if __name__ == "__main__":
    main()
