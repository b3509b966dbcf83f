"""What a shell starts in place of `stepladder`, `python` and `torchrun`: they are forks of the warm
process.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from warm import Forked, ask, at_start, can_run

HANDED_ON = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT


def main(address: str, started_in: Mapping[str, str], python: str) -> None:
    """Stands for the command: hands signals on and ends as it does. Killed, it takes the command
    with it.
    """
    program = Path(python).with_name(Path(sys.argv[0]).name)
    arguments = sys.argv[1:] if program.name == "python" else [str(program), *sys.argv[1:]]
    if not can_run(arguments) or at_start(os.environ) != started_in:
        os.execv(python, [python, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDED_ON)
    request = [arguments, str(Path.cwd()), dict(os.environ), False], True
    command = Forked(arguments, ask(Path(address), request, [0, 1, 2]))
    for number in HANDED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: command.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDED_ON)
    code = command.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
