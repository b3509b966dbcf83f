"""A script without torch that does what it is told, in the ranks that it is told for.

script.py about                         prints who it is, as JSON
script.py raise|exit|kill RANK [WHAT]   RANK fails so, the others wait; kill: if there is no file WHAT
script.py hold FILE                     each rank writes its pid to FILE.RANK, and waits for a signal
script.py resume FILE                   as hold; at SIGTERM, SIGINT or SIGHUP it ends with exit code 75
"""

import atexit
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

rank = int(os.environ["RANK"])
NAMES = (
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_NAME",
    "OMP_NUM_THREADS",
)
NAMES += ("PYTHONUNBUFFERED", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Local:
    """Something that only a real __main__ can pickle by name."""


def about():
    atexit.register(print, "at exit")
    main = sys.modules["__main__"]
    known = main.Local is Local and main.__file__ == __file__ and __name__ == "__main__"
    found = {
        "known": known,
        "argv": sys.argv,
        "path": sys.path[0],
        "process": multiprocessing.current_process().name,
    }
    print(json.dumps(found | {name: os.environ.get(name) for name in NAMES}))
    print("to stderr", file=sys.stderr)


def fail(how, what):
    if how == "raise":
        raise {"value": ValueError, "memory": MemoryError, "import": ModuleNotFoundError}[
            what or "value"
        ]("trouble")
    if how == "exit":
        sys.exit(int(what) if what.isdigit() else what)
    if how == "kill" and not pathlib.Path(what).exists():
        pathlib.Path(what).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def hold(file):
    child = subprocess.Popen(["sleep", "1000"])
    aside = pathlib.Path(f"{file}.{rank}.tmp")
    aside.write_text(f"{os.getpid()} {child.pid}")
    aside.rename(f"{file}.{rank}")
    while True:
        time.sleep(0.1)


def resume(file):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(75))
    signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path(f"{file}.{rank}.warned").touch())
    hold(file)


command, *rest = sys.argv[1:]
if command == "about":
    about()
elif command in ("hold", "resume"):
    {"hold": hold, "resume": resume}[command](*rest)
elif rank == int(rest[0]):
    fail(command, rest[1] if len(rest) > 1 else "")
elif command != "kill" and os.environ["WORLD_SIZE"] != "1":
    time.sleep(1000)
