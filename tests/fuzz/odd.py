"""What is drawn: values of each type of a flag, good ones among odd ones; and a folder that holds
odd files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import numpy as np
from hypothesis import strategies as st

from fuzzing import Sandbox

NUMBERS = [
    "", " ", "²", "٣", "1" * 30, "9" * 400, "nan", "inf", "-inf", "-1", "0", "1e-9", "1e309", "1e308", "+1",
    "1_0", " 1", "0x1",
    "1.5", "65536", "4294967296", "9007199254740993", "18446744073709551616", "None", "true", "--", "-", "1:2",
    "2:1", "1,1", "3",
]  # fmt: skip
TEXTS = [
    "",
    " ",
    "\n",
    "a\nb",
    "a\x1b[31mb",
    "é",
    "²",
    "x" * 300,
    "x" * 5000,
    "\udcff\udcfe",
    "%s",
    "{}",
    "--",
    "-",
    "$(id)",
    "a/b,a",
    ".",
    "=",
    ",",
]
PATHS = [
    "", " ", ".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "fifo", "folder", "loop", "closed",
    "closed/file", "file",
    "file/below", "empty", "gone", "gone/below", "a\nb", "\udcff\udcfe", "x" * 300, "x/" * 2000, "broken",
    "here -> there", "/dev/zero",
    "socket", "huge", "binary",
]  # fmt: skip
RANGES = [*NUMBERS, "auto", "gpu", "cpu", "1:", ":1", "1:1", "1:2:3", "1:²", "2:3", "10**6", "65"]
HOSTS = [
    "a:b",
    "[::1]:22",
    "nowhere.invalid",
    "a,,b",
    "127.0.0.1:99999",
    "user@",
    "@host",
    "-oProxyCommand=id",
    "127.0.0.1:²",
    "::1",
    "localhost",
    "256.256.256.256",
    "[",
    "a b",
]
ENDPOINTS = [
    *HOSTS,
    "127.0.0.1:0",
    "127.0.0.1:65536",
    "127.0.0.1:٣",
    "nowhere.invalid:29400",
    ":29400",
    "127.0.0.1",
    "[::1]:1",
    "224.0.0.1:29400",
    "0.0.0.0:29400",
]
# By a flag's or argument's name; of others its type decides.
NAMED = {
    "nproc": RANGES, "nproc_per_node": RANGES, "nodes": RANGES, "nnodes": RANGES, "hosts": HOSTS,
    "peer": HOSTS, "local_addr": HOSTS,
    "master_addr": HOSTS, "rdzv_endpoint": ENDPOINTS, "redirects": ["0", "3", "9:3", "0:1,1:2", "0:9", "²",
    "4", "0:", ":", "0:1,0:2", "0:1,"],
    "tee": ["0", "3", "9:3", "0:1", "²", "4"], "local_ranks_filter": ["0", "9", "0,1", "²", "a", "0,", "-1",
    "9" * 30],
    "rdzv_backend": ["c10d", "static", "etcd", "etcd-v2", "zeus", "C10D"],
    "rdzv_conf": ["a", "a=b", "timeout=x", "join_timeout=-1", "read_timeout=nan", "=", "a=b,c",
    "is_host=maybe", "store_type=x", "last_call_timeout=9999999999"],
    "signals_to_handle": ["SIGKILL", "SIGSTOP", "SIGTERM", "SIGNONE", "9", "SIGTERM,SIGKILL", "SIGSEGV",
    "SIG_DFL", "CTRL_C_EVENT", "SIGCHLD"],
    "fail_at": ["0:1", "9:1", "1:²", ":", "0", "0:0", "0:9999999999", "-1:1"], "time": ["1", "0", "1:2",
    "1:2:3:4", "1-", "1-1:1:1", "²", "-1", "INFINITE", "9" * 30, "1:99:99"],
    "mem": ["1", "64G", "²", "0", "-1", "64GG", "9" * 30], "gpus_per_node": ["1", "a:1", "²", "a:", ":1",
    "a:b:1", "-1", "9" * 30, "1\n#SBATCH -w n1"],
    "dtypes": ["a=float32", "a=", "=float32", "a", "a=object", "a=uint8", "b=S3", "a=datetime64[us]", "a=,",
    "a=int8"],
    "columns": ["a", "a,b", "a,a", "a/b,a", ".", "", ",", "..", "b", "x" * 300, "c"], "word": ["a"],
}  # fmt: skip
COUNTS = st.sampled_from(["1", "2"])


def values(name: str, kind: click.ParamType, good: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """As texts of the command line."""
    mixed = [st.sampled_from(good)] if good else []
    if name in NAMED:
        return st.one_of(*mixed, st.sampled_from(NAMED[name]))
    if isinstance(kind, click.Choice):
        return st.one_of(st.sampled_from(list(map(str, kind.choices))), st.sampled_from(TEXTS))
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        return st.one_of(
            *mixed,
            COUNTS,
            st.sampled_from(NUMBERS),
            st.floats().map(str),
            st.integers(-(2**70), 0).map(str),
        )
    if isinstance(kind, click.Path):
        return st.one_of(*mixed, st.sampled_from(PATHS))
    return st.one_of(
        *mixed, st.sampled_from(TEXTS), st.sampled_from(PATHS), st.sampled_from(NUMBERS)
    )


def prepare(sandbox: Sandbox, checkout: Path) -> Path:
    """A folder with one of everything, a finished run and shards among them, and what is none of
    these.
    """
    here = sandbox.cwd
    for words in (
        ("train", "mlp", "--steps", "4", "--samples", "512", "--run-dir", "run"),
        ("doctor", "--save", "bundle.json"),
    ):
        sandbox.call(words).validate_end()
    (here / "table.csv").write_text("a,b,c\n1,2.5,x\n2,3.5,y\n3,4.5,z\n")
    (here / "numbers.csv").write_text("a,b\n" + "".join(f"{n},{n / 2}\n" for n in range(100)))
    sandbox.give_to_stranger(here)
    sandbox.call(
        ("data", "shard", "numbers.csv", "--out", "shards", "--chunk-rows", "8")
    ).validate_end()
    np.savez(here / "arrays.npz", x=np.arange(12).reshape(4, 3), y=np.arange(4))
    (here / "script.py").write_text("import sys\nsys.exit(0)\n")
    (here / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    (here / "augmented.py").write_bytes((checkout / "tests" / "jobs" / "augmented.py").read_bytes())
    for name in ("lessons", "docs"):
        shutil.copytree(checkout / name, here / name, ignore=shutil.ignore_patterns("__pycache__"))
    odd_files(here)
    sandbox.give_to_stranger(here)
    return sandbox.keep()


def odd_files(here: Path) -> None:
    os.mkfifo(here / "fifo")
    for name in ("folder", "closed"):
        (here / name).mkdir()
    (here / "closed" / "file").touch()
    (here / "loop").symlink_to("loop")
    (here / "broken").symlink_to("nowhere")
    (here / "file").write_text("a line\n")
    (here / "empty").touch()
    (here / "binary").write_bytes(bytes(range(256)) * 40)
    with (here / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(here):
        made.bind("socket")
    (here / "closed").chmod(0)


# -- what becomes of a file: a function of its path ------------------------------------------------


def damaged() -> st.SearchStrategy[Callable[[Path], None]]:
    """Cut, with bits turned, with zeros or other bytes in its middle, or many times as long."""

    def change(how: str, place: float, bits: int) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            data = bytearray(path.read_bytes())
            at = int(place * len(data))
            if how == "cut":
                data = data[:at]
            elif how == "turned" and data:
                data[at % len(data)] ^= bits
            elif how == "zeros":
                data[at : at + 16] = bytes(16)
            else:
                data[at:at] = bytes([bits]) * 1000
            path.write_bytes(data)

        return write

    ways = st.sampled_from(["cut", "turned", "turned", "zeros", "longer"])
    return st.builds(change, ways, st.floats(0, 1), st.integers(1, 255))


def replaced(others: Sequence[str]) -> st.SearchStrategy[Callable[[Path], None]]:
    """Another file of the folder in its place, or a folder, a pipe, a loop of links, a terabyte, or
    nothing.
    """

    def change(kind: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            kept = next(folder for folder in path.parents if folder.name == "here").with_name(
                "prepared"
            )
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
            if kind != "nothing":
                subprocess.run(["cp", "-a", kept / kind, path], check=True)

        return write

    return st.builds(
        change,
        st.sampled_from([*others, "fifo", "folder", "loop", "huge", "empty", "binary", "nothing"]),
    )
