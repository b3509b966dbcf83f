"""Writing shards: resumable after a kill or a full disk, never half-valid, memory bounded."""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from processes import SECONDS, wait_until
from stepladder import InputError, Shards, write_shards
from stepladder.data.shards.reader import ShardReader

ROWS = 100
CHUNK = 8
SHARD = 24


def rows(count: int = ROWS) -> Iterator[dict[str, Any]]:
    for i in range(count):
        yield {"x": np.full(1000, i, np.int16), "l": [i] * (i % 3)}


def write(out: Path, samples: Any = None, **more: Any) -> Path:
    return write_shards(rows() if samples is None else samples, out, CHUNK, SHARD, **more)


def content(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def is_right(folder: Path) -> None:
    with ShardReader(Shards(folder)) as reader:
        batch = reader.read(np.arange(ROWS))
    assert batch["x"][:, 7].tolist() == list(range(ROWS))
    assert np.diff(batch["l"].offsets).tolist() == [i % 3 for i in range(ROWS)]


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [0, 5, 24, 30, 47, 80, 99])
def test_stopped_anywhere_it_goes_on_and_ends_the_same(tmp_path: Path, after: int) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from rows(after)
        raise Stop

    with pytest.raises(Stop):
        write(tmp_path / "a", broken())
    with pytest.raises(InputError, match=r"not finished|holds no shards|there is no"):
        Shards(tmp_path / "a")
    write(tmp_path / "a")
    write(tmp_path / "b")
    is_right(tmp_path / "a")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    assert sorted(content(tmp_path / "a")) == [
        "index.json",
        *(f"shard-0000{i}.h5" for i in range(5)),
    ]


def test_written_again_it_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_other_settings_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="another compress: False, not True"):
        write(tmp_path, compress=True)
    with pytest.raises(InputError, match="another columns"):
        write(tmp_path, [{"y": 1}])
    changed = ({**row, "x": row["x"] + 1} for row in rows())
    with pytest.raises(InputError, match="another source"):
        write(tmp_path, changed)


def test_a_stranger_s_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.h5").write_bytes(b"mine")
    with pytest.raises(InputError, match="that this command did not write"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.h5"]


def test_lost_and_torn_notes_are_made_again(tmp_path: Path) -> None:
    def broken() -> Iterator[dict[str, Any]]:
        yield from rows(80)
        raise Stop

    with pytest.raises(Stop):
        write(tmp_path, broken())
    (tmp_path / "shard-00001.h5").unlink()
    with (tmp_path / "index.json.part").open("a") as notes:
        notes.write('{"rows": 24, "fi')
    write(tmp_path)
    is_right(tmp_path)


WRITER = """
import sys, time
sys.path.insert(0, {tests!r})
from test_writing import rows, write
def slow():
    for row in rows():
        time.sleep(0.01)
        yield row
write({out!r}, slow() if {slow} else rows())
"""


def writer(out: Path, slow: bool, **more: Any) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(Path(__file__).parent), out=str(out), slow=slow)
    tests = str(Path(__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{code}"],
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


@pytest.mark.slow
def test_kill_9_leaves_nothing_half_valid(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with writer(out, slow=True) as process:
        wait_until(lambda: (out / "shard-00001.h5").exists() or process.poll() is not None)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(InputError, match="not finished"):
        Shards(out)
    write(out)
    is_right(out)
    assert not [*out.glob("*.part"), *out.glob("*.tmp")]


def limited() -> None:
    """No file may grow beyond the third chunk: what a write then meets is what a full disk gives
    it.
    """
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    with writer(tmp_path, slow=False, preexec_fn=limited) as process:
        _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, error
    assert (
        "InputError: cannot write" in error
        and "shard-00000.h5: File too large. HINT: free some space" in error
    )
    assert not list(tmp_path.iterdir())
    write(tmp_path)
    is_right(tmp_path)


@pytest.mark.parametrize("name", ["index.json.part", "index.json"])
def test_no_room_for_the_index(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full just when a line of notes, or the index, is to be written."""

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (full if name == target(fd) else real)(fd))
    with pytest.raises(InputError, match="No space left on device"):
        write(tmp_path)
    monkeypatch.undo()
    assert not (tmp_path / "index.json").exists()
    write(tmp_path)
    is_right(tmp_path)


def target(fd: int) -> str:
    """The file that is fsynced, or that is written aside for it."""
    return re.sub(r"\.\w+\.tmp$", "", Path(f"/proc/self/fd/{fd}").readlink().name)


BAD = {
    "none": ([], "there are no samples"),
    "no dict": ([1], "sample 0: it is a int"),
    "text": ([{"x": "a"}], "sample 0: x is a str"),
    "shape": (
        [{"x": np.zeros(3)}, {"x": np.zeros(2)}],
        "sample 1: x is float64 of shape [2], and 3 float64",
    ),
    "missing": ([{"x": 1, "y": 2}, {"x": 1}], "sample 1: y is object"),
    "type": ([{"x": 1}, {"x": 1.5}], "sample 1: x is float64 of shape [], and int64"),
    "list": (
        [{"x": [1]}, {"x": [[1]]}],
        "sample 1: x is int64 of shape [1, 1], and lists of int64",
    ),
}


BAD |= {
    "no samples at all": (5, "samples=5. HINT: samples= Iterable"),
    "a number for a name": ([{1: 2}], "column 1 is not a valid name"),
    "lists of lists of several lengths": ([{"x": [[1], [1, 2]]}], "sample 0: x: "),
    "a second sample of another kind": ([{"x": 1}, 5], "sample 1: it is a int"),
    "a column that the first sample does not have": (
        [{"x": 1}, {"x": 1, "y": 2}],
        "sample 1: the first sample has no y. HINT: the same columns",
    ),
    "a number that float32 does not have": ([{"x": 0.5}, {"x": 1e39}], "sample 1: x is too large"),
    "a number that int32 does not have": (
        [{"x": np.int32(1)}, {"x": 2**40}],
        "sample 1: x is too large for int32",
    ),
    "True after a number": ([{"x": 1}, {"x": True}], "sample 1: x is bool"),
    "True in a list after numbers": ([{"x": [1]}, {"x": [True]}], "sample 1: x is bool"),
    "True among numbers": ([{"x": [1, True]}], "sample 0: x: it has numbers, and True or False"),
    "a number of 64 bits in a list": ([{"x": [1, 2**63]}], "sample 0: x: "),
    "a number of 64 bits in a tuple": ([{"x": (1, 2**64 - 1)}], "sample 0: x: "),
    "masked values": ([{"x": np.ma.array([1, 2], mask=[0, 1])}], "sample 0: x has masked values"),
    "a tensor that NumPy does not have": ([{"x": torch.ones(1).bfloat16()}], "sample 0: x: Got"),
    "a tensor with a gradient": ([{"x": torch.ones(1, requires_grad=True)}], "sample 0: x: Can't"),
}


@pytest.mark.parametrize("samples, message", BAD.values(), ids=BAD)
def test_bad_samples(tmp_path: Path, samples: list[Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        write(tmp_path, samples)
    assert message in str(caught.value)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    "value, message", [(0, "must be at least 1"), (1.5, "= int or None"), ("8", "= int or None")]
)
@pytest.mark.parametrize("setting", ["chunk_rows", "rows_per_shard"])
def test_bad_sizes(tmp_path: Path, setting: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_shards(rows(), tmp_path / "s", **{setting: value})
    assert not (tmp_path / "s").exists()


def test_chunks_are_no_larger_than_shards(tmp_path: Path) -> None:
    write_shards(rows(), tmp_path, chunk_rows=50, rows_per_shard=10)
    assert Shards(tmp_path).chunks.shards == ((10, 10),) * 10


MEMORY = """
import resource, numpy as np
from stepladder import write_shards
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def rows(count):
    for i in range(count): yield {"x": np.full(100_000, i % 250, np.uint8)}
write_shards(rows(20), OUT + "/few", 4)
before = peak()
write_shards(rows(1000), OUT + "/many", 4, 200)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """100 MB in chunks of 0.4 MB."""
    command = [sys.executable, "-c", f"OUT = {str(tmp_path)!r}" + MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 20, "MB"
    assert json.loads((tmp_path / "many" / "index.json").read_text())["rows"] == 1000
