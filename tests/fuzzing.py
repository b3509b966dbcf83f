"""Commands with inputs that nobody thought of, and what must hold for each: no traceback, no hang,
nothing left.

`fuzz.each(cases, attempt)` tries the cases that a hypothesis strategy draws: a few in `make test`,
in `make fuzz` as many as its minutes allow, from any seed. An attempt asserts; all that it finds is
kept, and one example of each kind told at the end. Nothing is shrunk: a case is small as it is, and
with a process each it would take minutes."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeVar

import psutil
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from left_over import OURS, below, end, reaping, remaining
from processes import COMMAND, read
from warm import Forked, Server

SEED = int(os.environ.get("FUZZ_SEED", "0"))
MINUTES = float(
    os.environ.get("FUZZ_MINUTES", "0")
)  # for all kinds together; 0: a few cases of each
FEW = 2
ROUND = 100
WORKING = 20.0  # seconds for what may have work to do; then it is asked to stop
LONG = 90.0  # for all else; then it hangs
STRANGER = 64000  # a user who has no files
# In place of root, who could harm the machine. May read all files: root's Python may be in root's
# own folder.
AS_STRANGER = (
    f"--reuid={STRANGER}",
    f"--regid={STRANGER}",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
)
ENDS_WITH_US = ("setpriv", "--pdeathsig=KILL")  # also where the tests are interrupted
QUIET = ("env", "TORCH_CPP_LOG_LEVEL=ERROR")  # as `train` has it before torch is loaded
LIMITED = (
    "prlimit",
    f"--fsize={256 << 20}",
    f"--data={8 << 30}",
)  # bytes: what takes more is seen, and harms nothing
# A command's own exit codes, and those of what it was stopped by.
ENDS = {0, 1, 2}
STOPPED_ENDS = {0, 1, 2, 75, 130, 137, 143, -signal.SIGTERM}
RAISED = re.compile(r'File "[^"]*?/(stepladder(?:_exchange)?/[^"]+)", line \d+, in (\S+)')
LONGEST = 1200  # characters of a line that says what is wrong

C = TypeVar("C")


class Failure(AssertionError):
    """kind: the same for all cases that have the same cause, as far as can be told from outside."""

    def __init__(self, kind: str, about: str) -> None:
        super().__init__(f"{kind}\n{about}")
        self.kind = kind


class Fuzz:
    """One test's cases. seconds: for all of them; 0: FEW cases."""

    def __init__(self, sandbox: Sandbox, seconds: float) -> None:
        self.sandbox = sandbox
        self.seconds = seconds
        self.tried: Counter[str] = Counter()  # by how they ended
        self.failures: dict[str, list[str]] = {}

    def each(self, cases: st.SearchStrategy[C], attempt: Callable[[C], str]) -> None:
        """attempt: returns how the case ended, in a word, or raises. Raises for all that was found,
        at the end.
        """
        deadline = time.monotonic() + self.seconds

        def attempt_case(case: C) -> None:
            if self.seconds and time.monotonic() > deadline:
                return
            try:
                self.tried[attempt(case)] += 1
            except AssertionError as error:
                self.tried["failed"] += 1
                kind = error.kind if isinstance(error, Failure) else str(error)[:200]
                self.failures.setdefault(kind, []).append(str(error))

        for number in itertools.count(SEED * 10_000):
            rules = settings(
                max_examples=ROUND if self.seconds else FEW,
                phases=[Phase.generate],
                deadline=None,
                database=None,
                derandomize=False,
                suppress_health_check=list(HealthCheck),
            )
            seed(number)(rules(given(cases)(attempt_case)))()
            if time.monotonic() >= deadline:
                break
        summaries = [f"{len(texts)} x {texts[0]}" for texts in self.failures.values()]
        if summaries:
            kinds = (
                f"{len(summaries)} kinds of failure in {self.tried.total()} cases of seed {SEED}"
            )
            pytest.fail("\n\n".join([kinds, *summaries]), pytrace=False)


class Sandbox:
    """Where cases run: below a short folder, as a user who may do nothing elsewhere where this is
    root.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = (*QUIET, *LIMITED, *ENDS_WITH_US, *(AS_STRANGER if os.geteuid() == 0 else ()))
        self.server = Server(self.before)
        self.env = {
            "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"),
            "XDG_STATE_HOME": str(folder / "home" / ("state" * 12)),  # too long a name for a lab
            # nobody listens there
            "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
        }  # fmt: skip
        self.cwd = folder / "here"
        self.reset()

    def reset(self, prepared: Path | None = None) -> None:
        """As if nothing had happened: with the files of `prepared`, links and pipes among them."""
        for path in (self.cwd, self.folder / "home", self.folder / "tmp"):
            subprocess.run(["chmod", "-Rf", "u+rwx", path], check=False)
            shutil.rmtree(path, ignore_errors=True)
            if path == self.cwd and prepared is not None:
                is_root = os.geteuid() == 0  # nobody else copies the files that may not be read
                subprocess.run(
                    ["cp", "-a", prepared, path], check=is_root, stderr=subprocess.DEVNULL
                )
            else:
                path.mkdir()
            self.give_to_stranger(path)

    def keep(self) -> Path:
        """What `reset` makes copies of: all that is here now."""
        kept = self.folder / "prepared"
        self.cwd.rename(kept)
        return kept

    def give_to_stranger(self, path: Path) -> None:
        if os.geteuid() == 0:
            subprocess.run(["chown", "-Rh", f"{STRANGER}:{STRANGER}", path], check=True)

    def start(
        self, arguments: list[str], env: Mapping[str, str], out: int, err: int
    ) -> Forked | subprocess.Popen[bytes]:
        full_env = {**os.environ, **self.env, **env}
        if self.server.can_run(arguments, full_env):
            return self.server.start(arguments, self.cwd, full_env, (out, err), new_session=True)
        return subprocess.Popen(
            [*self.before, *arguments],
            cwd=self.cwd,
            env=full_env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )

    def call(self, args: Iterable[str], env: Mapping[str, str] = {}, works: bool = False) -> Ended:
        """One command to its end, which must come. works: it may have much to do, and is asked to
        stop then.
        """
        arguments = [*COMMAND, *args]
        before = list_tree(self.folder)
        stopped = False
        with (
            TemporaryFile("w+", errors="surrogateescape") as out,
            TemporaryFile("w+", errors="surrogateescape") as err,
        ):
            process = self.start(arguments, env, out.fileno(), err.fileno())
            try:
                process.wait(WORKING if works else LONG)
            except subprocess.TimeoutExpired:
                stopped = works
                process.terminate()
                try:
                    process.wait(LONG if works else 1)
                except subprocess.TimeoutExpired:
                    end(below())
                    process.wait()
                    stopped = False
                if not stopped:
                    raise Failure(
                        f"no end: {arguments[3:4]}",
                        f"{format_command(env, arguments)}\n{read(out)}\n{read(err)}",
                    ) from None
            text = read(out), read(err)
        leftovers = remaining()
        new = sorted(
            path for path, state in list_tree(self.folder).items() if before.get(path) != state
        )
        # torch's own, at its first optimizer; and where records begin, which is kept in the cache.
        kept = "/torchinductor_", "/home/.cache"
        new = [path for path in new if not any(text in path for text in kept)]
        ended = Ended(format_command(env, arguments), process.returncode, *text, stopped, new)
        if leftovers:
            raise ended.make_failure(f"left running: {leftovers}")
        return ended


class Ended:
    """How a command ended. new: what it made or changed."""

    def __init__(
        self, arguments: str, code: int, out: str, err: str, stopped: bool, new: list[str]
    ) -> None:
        self.command = arguments
        self.code = code
        self.out = out
        self.err = err
        self.stopped = stopped
        self.new = new

    def make_failure(self, what: str) -> Failure:
        raised = RAISED.findall(self.err)
        lines = self.err.splitlines()
        kind = f"{what}: {' in '.join(raised[-1])}: {lines[-1][:80]}" if raised else what
        way = " > ".join(" in ".join(frame) for frame in raised[-5:])
        report = "\n".join(line[:300] for line in [*self.out.splitlines()[-5:], way, *lines[-8:]])
        return Failure(kind, f"{self.command}\nexit code {self.code}, new: {self.new}\n{report}")

    def validate_end(self, foreign: bool = False) -> str:
        """As the rule for bad input has it. foreign: the exit code may be that of a program of the
        user's.
        """
        if "Traceback (most recent call last)" in self.out + self.err:
            raise self.make_failure("traceback")
        if self.stopped:
            if self.code not in STOPPED_ENDS:
                raise self.make_failure(f"exit code {self.code} after SIGTERM")
            return "worked until it was stopped"
        if self.code not in ENDS and not foreign:
            raise self.make_failure(f"exit code {self.code}")
        if (
            self.code == 2
            and not self.err.startswith("Usage: ")
            and (not foreign or "error: " in self.err)
        ):
            self.validate_refusal(self.err.splitlines())
        return f"exit code {self.code}"

    def validate_refusal(self, lines: list[str]) -> None:
        errors = [line for line in lines if line.startswith("error: ")]
        if (
            errors != lines[-1:] or errors[0].count(". HINT: ") != 1
        ):  # before it may stand what was done by then
            raise self.make_failure("not one line")
        if not errors[0].isprintable() or len(errors[0]) > LONGEST:
            raise self.make_failure("not a line that can be read")
        if self.new:
            raise self.make_failure("something was made, and then the input was refused")


def format_command(env: Mapping[str, str], arguments: list[str]) -> str:
    texts = [
        *(f"{name}={value!r}" for name, value in env.items()),
        "stepladder",
        *map(ascii, arguments[3:]),
    ]
    return " ".join(text if len(text) < 100 else f"{text[:60]}...({len(text)})" for text in texts)


def list_tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Each path below it: kind, size and time of change."""
    found = {}
    for top, folders, files in os.walk(os.fsencode(folder)):
        for name in [*folders, *files]:
            path = os.path.join(top, name)  # noqa: PTH118 - names that are no UTF-8
            with suppress(OSError):
                stat = os.lstat(path)
                is_folder = name in folders
                found[os.fsdecode(path)] = (
                    stat.st_mode,
                    *((0, 0) if is_folder else (stat.st_size, stat.st_mtime_ns)),
                )
    return found


@contextmanager
def open_sandbox() -> Iterator[Sandbox]:
    """For the length of the block: a folder, and the process that forks commands there."""
    folder = Path(
        tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    )
    folder.chmod(0o755)
    with reaping():
        try:
            sandbox = Sandbox(folder)
            OURS.update(child.pid for child in psutil.Process().children(recursive=True))
            sandbox.server.can_run([sys.executable, "-m", "stepladder"], {})
            OURS.add(sandbox.server.pid)
            yield sandbox
        finally:
            end(below())
            sandbox.server.stop()
            OURS.clear()
            subprocess.run(["chmod", "-Rf", "u+rwx", folder], check=False)
            shutil.rmtree(folder)
