"""Each command that looks at a run directory, or goes on with it, and import, after damage was done
there.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from fuzzing import Fuzz, Sandbox
from processes import JOBS
from stepladder.core.durable import remove

pytestmark = pytest.mark.ranks

VALUES = [
    None, True, -1, 0, 1.5, 10**6, 10**18, 2**63, 10**400, float("nan"), float("inf"), -1e308, "", "x", "²",
    "a\nb\x1b[31m",
    "x" * 5000, "\0", "/dev/zero", "..", [], [None], [[]] * 3, {}, {"x": {}}, {"": 0},
]  # fmt: skip
MLP = ("mlp", "--samples", "256", "--global-batch", "32", "--epochs", "2")
COMMANDS = [
    ("train", *MLP, "--run-dir", "job"), ("train", *MLP, "--run-dir", "job", "--nproc", "2"),
    ("train", *MLP, "--run-dir", "done"), ("train", *MLP, "--run-dir", "done", "--fresh"),
    ("report", "job"), ("report", "done"), ("report", "script"), ("watch", "job", "--once"), ("watch", "done"),
    ("watch", "script", "--once"), ("audit", "job"), ("audit", "done", "--json"),
    ("diff", "job", "done"), ("diff", "done", "job", "--json"),
    ("verify", "done", "--steps", "2", "--nproc", "1", "--sync", "ddp"), ("recipe", "recommend", "done", "--user", "1"),
    ("recipe", "sample", "done", "--prompt", "a"), ("export", "job", "--to", "safetensors", "out"),
    ("export", "done", "--to", "dcp", "out"),
    ("import", "tensors", *MLP, "--run-dir", "new"), ("import", "dcp", *MLP, "--run-dir", "new"),
    ("run", "--run-dir", "script", "script.py", "about"), ("run", "--run-dir", "done", "script.py", "about"),
    ("submit", "--dry-run", "--", "train", *MLP, "--run-dir", "job"),
    ("after", "1", "--job-dir", "job", "--max-requeues", "3"), ("profile", "mlp", "--steps", "1", "--out", "job"),
]  # fmt: skip
FOLDERS = ("job", "done", "script", "tensors", "dcp")
WORKING = ("train", "verify", "diff", "run", "profile", "watch")
FOREIGN = ("run", "after")  # their exit code may be a script's, or 75
SLURM = {"SLURM_JOB_ID": "7", "STEPLADDER_END_FILE": "7:job/ended.json"}

Damage = Callable[[Path, random.Random, list[Path]], object]


def prepare(sandbox: Sandbox) -> Path:
    """A run that stopped on its way, one that is finished, a script's, and weights that were
    written elsewhere.
    """
    for words in (
        (
            "train",
            *MLP,
            "--run-dir",
            "job",
            "--nproc",
            "2",
            "--steps",
            "8",
            "--snapshot-every",
            "3",
        ),
        ("train", *MLP, "--run-dir", "done"),
        ("run", "--run-dir", "script", "--nproc", "2", "slow.py"),
        ("export", "done", "--to", "safetensors", "tensors"),
        ("export", "done", "--to", "dcp", "dcp"),
    ):
        for name, source in (("script.py", "script.py"), ("slow.py", "slow_rank.py")):
            (sandbox.cwd / name).write_bytes((JOBS / source).read_bytes())
        sandbox.call(words, works=True).validate_end(foreign=True)
    end = {"code": 75, "step": 8, "late": False, "job": "7", "restart": 0}
    (sandbox.cwd / "job/ended.json").write_text(f"{json.dumps(end)}\n")
    line = {
        "job": "7",
        "restart": 0,
        "reason": "bug",
        "requeued": True,
        "step": 3,
        "code": 1,
        "lost": [],
        "time": 1e9,
    }
    (sandbox.cwd / "job/requeues.jsonl").write_text(f"{json.dumps(line)}\n" * 2)
    (sandbox.cwd / "job/loggers.json").write_text("{}")
    (sandbox.cwd / "job/rendezvous.json").write_text('{"number": 1, "host": "x", "port": 1}')
    sandbox.give_to_stranger(sandbox.cwd)
    return sandbox.keep()


# -- damage ----------------------------------------------------------------------------------------


def cut(path: Path, chance: random.Random, _: list[Path]) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size + 1))


def flipped(path: Path, chance: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    for _times in range(chance.randrange(1, 4) if data else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def another(path: Path, chance: random.Random, files: list[Path]) -> None:
    path.write_bytes(chance.choice(files).read_bytes())


def replaced(value: Any, chance: random.Random) -> Any:
    """With one value within it that is another."""
    places = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    if not places or chance.random() < 0.1:
        return chance.choice(VALUES)
    place = chance.choice(places)
    if chance.random() < 0.2:
        del value[place]
    else:
        value[place] = replaced(value[place], chance)
    return value


def wrong_values(path: Path, chance: random.Random, files: list[Path]) -> None:
    """In a JSON file, or in some lines of one of lines."""
    try:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        for _times in range(chance.randrange(1, 4) if lines else 0):
            number = chance.randrange(len(lines))
            lines[number] = json.dumps(replaced(json.loads(lines[number]), chance))
        path.write_text("".join(f"{line}\n" for line in lines))
    except (ValueError, RecursionError):  # it is no JSON, or not any more
        flipped(path, chance, files)


def torn(path: Path, chance: random.Random, _: list[Path]) -> None:
    with path.open("ab") as file:
        file.write(
            chance.choice(
                [b'{"step": 3, "l', b"\n\n", b"\0" * 100, b"\xff\xfe\n", b"[" * 100_000 + b"\n"]
            )
        )


def in_its_place(make: Callable[[Path], object]) -> Damage:
    def put(path: Path, _chance: random.Random, _files: list[Path]) -> None:
        remove(path)
        make(path)

    return put


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


OF_FILES: list[Damage] = [cut, flipped, another, wrong_values, wrong_values, wrong_values, torn]
OF_PLACES = [
    in_its_place(make)
    for make in (
        lambda path: None, Path.mkdir, Path.touch, os.mkfifo, sparse,
        lambda path: path.symlink_to(path.name), lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("/"),
    )
]  # fmt: skip


def damage(folder: Path, chance: random.Random) -> list[str]:
    """One to three things in a run directory; what it was."""
    names = []
    for _times in range(chance.choice([1, 1, 2, 3])):
        paths = sorted(path for path in folder.rglob("*") if not path.is_symlink())
        files = [path for path in paths if path.is_file() and path.stat().st_size < 1 << 30]
        if not paths:
            break
        small = [
            path for path in files if path.suffix in (".json", ".jsonl") or path.name == "lock"
        ]
        path = chance.choice(paths)
        how = chance.choice(OF_PLACES)
        if chance.random() < 0.7 and files:
            path = chance.choice(small if small and chance.random() < 0.8 else files)
            how = chance.choice(OF_FILES)
        how(path, chance, files)
        names.append(str(path.relative_to(folder)))
    return names


@pytest.mark.slow
def test_a_damaged_run_directory_ends_as_the_rule_says(fuzz: Fuzz) -> None:
    prepared = prepare(fuzz.sandbox)

    def attempt(case: tuple[tuple[str, ...], int]) -> str:
        args, number = case
        fuzz.sandbox.reset(prepared)
        folder = fuzz.sandbox.cwd / next(name for name in FOLDERS if name in args)
        names = damage(folder, random.Random(number))
        fuzz.sandbox.give_to_stranger(fuzz.sandbox.cwd)
        try:
            ended = fuzz.sandbox.call(
                args, SLURM if args[0] == "after" else {}, works=args[0] in WORKING
            )
            ended.new = [path for path in ended.new if not is_of_lock(path)]
            return ended.validate_end(foreign=args[0] in FOREIGN)
        except AssertionError as error:
            error.args = (f"{error}\ndamaged: {names}, case {number}",)
            raise

    fuzz.each(st.tuples(st.sampled_from(COMMANDS), st.integers(0, 2**32)), attempt)


ERRORS = [
    "EIO",
    "ESTALE",
    "ENOSPC",
    "EDQUOT",
    "EROFS",
    "ENXIO",
    "ENODEV",
    "EACCES",
    "ENOENT",
    "ELOOP",
    "ENOTDIR",
]
NAMES = [
    "config.json", "metrics.jsonl", "timing.jsonl", "ledger", "attempt-", "snapshots", "manifest.json", "state.pt",
    "model.safetensors", "result.json", "lock", "log", "tensorboard", "launches.jsonl", "steps", "rendezvous",
]  # fmt: skip
AT_START = """
import os, sys
sys.path.insert(0, os.environ["FAULTS"])
import faults
name, error, first, count = os.environ["FAULT"].split()
faults.install()
faults.FAULT.plant(*faults.from_text(f"{name} {error}"), count=int(count) or None, first=int(first))
"""


@pytest.mark.slow
def test_a_run_directory_whose_files_fail_meanwhile_ends_as_the_rule_says(fuzz: Fuzz) -> None:
    """From some use of a file on, once or for ever, in all processes of the command."""
    prepared = prepare(fuzz.sandbox)

    def attempt(case: tuple[tuple[str, ...], str, str, int, int]) -> str:
        args, name, error, first, count = case
        fuzz.sandbox.reset(prepared)
        folder = next(name for name in FOLDERS if name in args)
        (fuzz.sandbox.folder / "tmp" / "sitecustomize.py").write_text(AT_START)
        env = {
            "PYTHONPATH": os.pathsep.join([str(fuzz.sandbox.folder / "tmp"), os.environ.get("PYTHONPATH", "")]),
            "FAULTS": str(JOBS),
            "FAULT": f"{folder}/{name} {error} {first} {count}", **(SLURM if args[0] == "after" else {}),
        }  # fmt: skip
        ended = fuzz.sandbox.call(args, env, works=args[0] in WORKING)
        ended.new = []  # it had begun
        return ended.validate_end(foreign=args[0] in FOREIGN)

    uses = st.integers(0, 30)
    counts = st.sampled_from([0, 1, 3])
    fuzz.each(
        st.tuples(
            st.sampled_from(COMMANDS), st.sampled_from(NAMES), st.sampled_from(ERRORS), uses, counts
        ),
        attempt,
    )


@pytest.mark.slow
def test_a_run_directory_that_changes_meanwhile_ends_as_the_rule_says(fuzz: Fuzz) -> None:
    """Files vanish, or become folders, pipes or loops of links, at any moment of a command."""
    prepared = prepare(fuzz.sandbox)

    def attempt(case: tuple[tuple[str, ...], int]) -> str:
        args, number = case
        fuzz.sandbox.reset(prepared)
        folder = fuzz.sandbox.cwd / next(name for name in FOLDERS if name in args)
        chance = random.Random(number)
        is_over = threading.Event()

        def change() -> None:
            while not is_over.wait(chance.uniform(0.0, 1.0)):
                paths = sorted(path for path in folder.rglob("*") if not path.is_symlink())
                with suppress(OSError):  # the command has changed it, too
                    if paths:
                        chance.choice(OF_PLACES)(chance.choice(paths), chance, [])

        changes = threading.Thread(target=change)
        changes.start()
        try:
            ended = fuzz.sandbox.call(
                args, SLURM if args[0] == "after" else {}, works=args[0] in WORKING
            )
        except AssertionError as error:
            error.args = (f"{error}\ncase {number}",)
            raise
        finally:
            is_over.set()
            changes.join()
        ended.new = []  # of whomever
        return ended.validate_end(foreign=args[0] in FOREIGN)

    fuzz.each(st.tuples(st.sampled_from(COMMANDS), st.integers(0, 2**32)), attempt)


def is_of_lock(path: str) -> bool:
    """Who refuses has looked whether somebody writes there."""
    return Path(path).name in ("lock", "lock.held")
