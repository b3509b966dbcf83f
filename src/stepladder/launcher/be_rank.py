"""What `srun -n N stepladder run SCRIPT` becomes on each rank: the script, and a thread that looks at the rank.

python -m stepladder.launcher.be_rank SECONDS|"" file|module NAME ARGS
"""

from __future__ import annotations

import sys
from types import TracebackType

from stepladder.core.world import World
from stepladder.launcher.nodes.self_watch import watch_itself
from stepladder.launcher.script import Script
from stepladder.rank.error_record import RankError
from stepladder.rank.progress import count_steps


def main() -> None:
    seconds, kind, name, *args = sys.argv[1:]
    script = Script(name, tuple(args), kind)
    if script.imports_torch:
        import torch.optim  # noqa: F401  # as the script will, before its steps can be counted
    count_steps()
    world = World.detect()
    watch = watch_itself(world, float(seconds) if seconds else None)

    def show(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        failure = RankError.of(world.rank, error)
        if not watch.says_who_left(failure):
            print(failure.trace, end="", file=sys.stderr)

    sys.excepthook = show
    script.run_here()


if __name__ == "__main__":
    main()
