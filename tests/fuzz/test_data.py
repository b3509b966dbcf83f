"""Data files that are damaged, odd or something else, for all that reads them."""

from __future__ import annotations

import gzip
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import strategies as st
from odd import NUMBERS, damaged, odd_files, replaced

from fuzzing import Fuzz

pytestmark = pytest.mark.ranks

COLUMNS = [
    "a",
    "b",
    "a/b",
    ".",
    "..",
    "",
    "a b",
    "é",
    "x" * 300,
    "a\nb",
    "a\x00",
    "1",
    "ends",
    "\u202e",
]
VALUES = [*NUMBERS, "1", "2.5", "300", "1e39", "x", "\x00", '"', "1;2", "2024-01-01", "[1,2]"]
TYPES = [
    "uint8",
    "int8",
    "float16",
    "bool",
    "S3",
    "object",
    "datetime64[us]",
    ",",
    "f8,f8",
    "(2,)f8",
    "",
    "<M8",
    "x" * 300,
]
RATINGS = "userId,movieId,rating,timestamp\n1,2,3.5,100\n1,3,4,101\n2,2,5,102\n2,3,1,103\n"
FILES = (
    "images-idx3-ubyte",
    "images-idx3-ubyte.gz",
    "arrays.npz",
    "table.parquet",
    "loose.h5",
    "ratings.csv",
    "ratings.zip",
    "data.tar",
    "numbers.csv",
    "shards/index.json",
    "shards/shard-00000.h5",
)


def prepare(here: Path) -> None:
    """A file of each kind."""
    images = struct.pack(">4I", 2051, 3, 2, 2) + bytes(12)
    (here / "images-idx3-ubyte").write_bytes(images)
    (here / "images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    np.savez(here / "arrays.npz", x=np.arange(12).reshape(4, 3), y=np.arange(4))
    (here / "numbers.csv").write_text("a,b\n" + "".join(f"{n},{n / 2}\n" for n in range(100)))
    with h5py.File(here / "loose.h5", "w") as h5:
        h5["x"], h5["y"] = np.arange(40).reshape(10, 4), np.arange(10)
    (here / "ratings.csv").write_text(RATINGS)
    with zipfile.ZipFile(here / "ratings.zip", "w") as archive:
        archive.writestr("ml-latest-small/ratings.csv", RATINGS)
    with tarfile.open(here / "data.tar", "w") as archive:
        archive.add(here / "ratings.csv", "ratings.csv")
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        (here / "table.parquet").write_bytes(b"PAR1")
    else:
        lists = [[n] * n for n in range(5)]
        pyarrow.parquet.write_table(
            pyarrow.table({"a": range(5), "b": lists}), here / "table.parquet"
        )
    odd_files(here)


def csv_files() -> st.SearchStrategy[tuple[str, bytes]]:
    rows = st.lists(st.lists(st.sampled_from(VALUES), min_size=1, max_size=3), max_size=3)
    header = st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3)
    lines = st.tuples(header, rows).map(
        lambda parts: [parts[0], *(row[: len(parts[0])] for row in parts[1])]
    )
    return lines.map(
        lambda found: (
            "odd.csv",
            "\n".join(map(",".join, found)).encode("utf-8", "surrogateescape"),
        )
    )


def npz(array: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, x=array)


ARRAYS: dict[str, Any] = {
    "0-d": np.array(1), "empty": np.zeros((0, 3)), "no columns": np.zeros((3, 0)), "objects": np.array([{}],
    object),
    "texts": np.array(["a"]), "Fortran": np.asfortranarray(np.ones((3, 2))), "other order": np.ones(3, ">f8"),
    "complex": np.ones(3, complex), "dates": np.zeros(3, "M8[s]"), "a record": np.zeros(3, "f8,i4"),
    "wide": np.zeros((1, 1 << 20)),
}  # fmt: skip
LARGE = 2**32 - 1
HEADERS = [
    (2051, LARGE, LARGE, LARGE),
    (2051, 0, 0, 0),
    (2049, LARGE),
    (2051, 3, 0, 2),
    (2049, 0),
    (0,),
    (2303,),
]
ODD = ["fifo", "folder", "loop", "empty", "huge", "binary", "socket", "/dev/zero", "/dev/null"]
MANY = ["1", "4096", "9007199254740992", "1000000000000000000"]


def sources() -> st.SearchStrategy[tuple[str, object]]:
    """A file's name, and what is to be done with it: bytes to write, or a change to make."""
    return st.one_of(
        csv_files(),
        st.sampled_from(sorted(ARRAYS)).map(lambda name: ("odd.npz", npz(ARRAYS[name]))),
        st.sampled_from(HEADERS).map(
            lambda numbers: ("odd-idx", struct.pack(f">{len(numbers)}I", *numbers))
        ),
        st.tuples(st.sampled_from(FILES), st.one_of(damaged(), replaced(FILES))),
        st.tuples(st.just("shards/index.json"), json_changes()),
        st.sampled_from(ODD).map(lambda name: (name, None)),
    )


def json_changes() -> st.SearchStrategy[Callable[[Path], None]]:
    odd = st.sampled_from(
        [None, -1, 0, 2**70, 1.5, "", "x", "../x", "²", [], {}, True, [[]], 1e308]
    )

    def change(at: int, value: object) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            whole = json.loads(path.read_text())
            places: list[tuple[Any, Any]] = []

            def walk(part: Any) -> None:
                for key in list(part) if isinstance(part, dict) else range(len(part)):
                    places.append((part, key))
                    if isinstance(part[key], (dict, list)):
                        walk(part[key])

            walk(whole)
            part, key = places[at % len(places)]
            part[key] = value
            path.write_text(json.dumps(whole))

        return write

    return st.builds(change, st.integers(0, 10_000), odd)


def commands(name: str) -> st.SearchStrategy[tuple[str, ...]]:
    folder = name.partition("/")[0] if "/" in name[1:] else name
    flags = st.lists(
        st.one_of(
            st.sampled_from(COLUMNS).map(lambda text: ("--columns", text.replace("\x00", ""))),
            st.tuples(st.sampled_from(COLUMNS), st.sampled_from(TYPES)).map(
                lambda pair: ("--dtype", "=".join(pair).replace("\x00", ""))
            ),
            st.tuples(st.sampled_from(["--chunk-rows", "--rows-per-shard"]), st.sampled_from(MANY)),
            st.just(("--compress",)),
        ),
        max_size=2,
    ).map(lambda parts: tuple(word for part in parts for word in part))
    return st.one_of(
        flags.map(lambda words: ("data", "shard", folder, "--out", "o", *words)),
        st.just(("data", "info", folder)),
        st.just(("data", "info", folder, "--check", "--json")),
        st.just(("data", "get", "mnist", "--from", folder, "--data-dir", "o")),
        st.just(("data", "get", "movielens-small", "--from", folder, "--data-dir", "o")),
        st.just(("train", "movielens", "--data-dir", folder, "--steps", "1", "--run-dir", "o")),
        st.just(("train", "mnist", "--data-dir", folder, "--steps", "1", "--run-dir", "o")),
    )


@pytest.mark.slow
def test_data_of_any_kind_is_read_or_refused(fuzz: Fuzz) -> None:
    here = fuzz.sandbox.cwd
    prepare(here)
    fuzz.sandbox.give_to_stranger(here)
    fuzz.sandbox.call(
        ("data", "shard", "numbers.csv", "--out", "shards", "--chunk-rows", "8")
    ).validate_end()
    prepared = fuzz.sandbox.keep()

    def attempt(case: tuple[tuple[str, Any], tuple[str, ...]]) -> str:
        (name, what), words = case
        fuzz.sandbox.reset(prepared)
        if isinstance(what, bytes):
            (here / name).write_bytes(what)
        elif what is not None:
            what(here / name)
        fuzz.sandbox.give_to_stranger(here)
        return fuzz.sandbox.call(words, works=words[0] == "train").validate_end()

    fuzz.each(
        sources().flatmap(lambda source: st.tuples(st.just(source), commands(source[0]))), attempt
    )
