import contextlib
import gzip
import hashlib
import io
import json
import os
import pty
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import stepladder.cli
from processes import SECONDS
from stepladder.data.fetch import catalog
from stepladder.data.fetch.catalog import DataSet, RemoteFile

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the real data files are not beside the repository"
)
RATINGS = "userId,movieId,rating,timestamp\r\n1,10,4.0,1\r\n1,20,3.5,2\r\n2,10,1.0,3\r\n"
TINY = b"tiny data set"


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Type `stepladder data ...` in tmp_path: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def type_it(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            stepladder.cli.main(["data", *map(str, args)])
        assert isinstance(ended.value.code, int)
        return ended.value.code, *capsys.readouterr()

    return type_it


def refused(result: tuple[int, str, str], *parts: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds the parts and a hint."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for part in (*parts, "HINT: "):
        assert part in err


@pytest.fixture
def tiny(monkeypatch):
    """A data set `tiny` of one file, whose mirror does not listen."""
    file = RemoteFile(
        "f.bin", len(TINY), hashlib.sha256(TINY).hexdigest(), ("http://127.0.0.1:9/f.bin",)
    )
    dataset = DataSet("tiny", (file,), "free for all", "Nobody 1999")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(catalog.CATALOG, "tiny", dataset)


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 2048 + array.ndim, *array.shape) + array.tobytes()


def small_zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("ml-latest-small/ratings.csv", RATINGS)
    return buffer.getvalue()


def test_get_says_where_and_under_which_licence(run, tiny, tmp_path):
    (tmp_path / "f.bin").write_bytes(TINY)
    code, out, err = run("get", "tiny", "--from", "f.bin")
    assert code == 0
    assert out.splitlines() == [
        f"tiny: 1 files, 13 bytes, checked, in {Path('data/tiny')}",
        "licence: free for all",
        "cite: Nobody 1999",
    ]
    assert err == "f.bin: copied 13 bytes\n"
    assert Path("data/tiny/f.bin").read_bytes() == TINY


def test_get_says_one_line_of_a_file_of_another_size(run, tiny, tmp_path):
    (tmp_path / "f.bin").write_bytes(TINY[1:])
    refused(
        run("get", "tiny", "--from", "f.bin"),
        "cannot use f.bin from f.bin: stopped after 12 of 13 bytes",
    )


def test_get_json_is_the_last_line(run, tiny, tmp_path):
    (tmp_path / "f.bin").write_bytes(TINY)
    _, out, _ = run("get", "tiny", "--from", tmp_path, "--data-dir", "here", "--json")
    assert json.loads(out.splitlines()[-1]) == {
        "schema": 1,
        "dataset": "tiny",
        "path": "here",
        "files": ["f.bin"],
        "bytes": 13,
    }


def test_get_without_a_network(run, tiny):
    code, out, err = run("get", "tiny")
    assert (code, out) == (2, "")
    assert err.splitlines()[0] == "f.bin: fetching 13 bytes"
    assert "error: no mirror gave f.bin (127.0.0.1:9: Connection refused)" in err
    assert err.endswith("stepladder data get tiny --from PATH\n")


def test_get_unknown_name(run):
    refused(run("get", "cifar"), "no data set 'cifar'", "mnist, movielens-small")


def test_get_from_nowhere_writes_nothing(run, tiny, tmp_path):
    refused(run("get", "tiny", "--from", "nowhere"), "there is no nowhere")
    assert list(tmp_path.iterdir()) == []


def test_get_into_a_file(run, tiny, tmp_path):
    (tmp_path / "f.bin").write_bytes(TINY)
    code, _, err = run("get", "tiny", "--from", "f.bin", "--data-dir", "f.bin/x")
    assert code == 2
    assert "cannot write f.bin/x: Not a directory" in err


def test_get_shows_a_bar_on_a_terminal(tiny, tmp_path):
    (tmp_path / "f.bin").write_bytes(TINY)
    code = (
        "from stepladder.data.fetch.catalog import *\nimport stepladder.cli\n"
        f"CATALOG['tiny'] = {catalog.CATALOG['tiny']!r}\n"
        "stepladder.cli.main(['data', 'get', 'tiny', '--from', 'f.bin'])"
    )
    ours, theirs = pty.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as child:
        os.close(theirs)
        shown = drain(ours)
    assert child.returncode == 0
    assert "f.bin: copied 13 bytes" in shown
    assert "13/13 bytes" in shown


def drain(terminal: int) -> str:
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has gone
        while data := os.read(terminal, 65536):
            shown += data
    os.close(terminal)
    return shown.decode()


def test_module_imports_neither_torch_nor_numpy():
    code = "import sys, stepladder.cli.data; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "set()\n"


def test_info_of_one_image_file(run, tmp_path):
    pixels = np.array([[[0, 255], [255, 0]]] * 3, np.uint8)
    (tmp_path / "x").write_bytes(idx_bytes(pixels))
    code, out, _ = run("info", "x", "--json")
    facts = json.loads(out)
    (file,) = facts.pop("files")
    assert facts == {"schema": 1, "dataset": "idx", "path": "x", "bytes": 28}
    assert (file["name"], file["rows"], file["shape"], file["dtype"]) == (
        "x",
        3,
        [3, 2, 2],
        "uint8",
    )
    assert (code, file["bytes"], file["mean"], file["std"]) == (0, 28, 0.5, 0.5)


def test_info_of_one_label_file(run, tmp_path):
    (tmp_path / "y").write_bytes(gzip.compress(idx_bytes(np.array([0, 2, 2, 9], np.uint8))))
    _, out, _ = run("info", "y")
    assert "y: 4 uint8, " in out
    assert "labels 0: 1, 1: 0, 2: 2, " in out
    assert out.endswith("9: 1\n")
    assert run("info", "y", "--check")[1] == f"{out}y: 1 file of idx, all can be read\n"


def test_info_of_no_images(run, tmp_path):
    (tmp_path / "x").write_bytes(idx_bytes(np.zeros((0, 28, 28), np.uint8)))
    code, out, _ = run("info", "x")
    assert code == 0
    assert "0 x 28 x 28 uint8" in out


def test_info_of_ratings(run, tmp_path):
    (tmp_path / "folder" / "ml-latest-small").mkdir(parents=True)
    (tmp_path / "folder" / "ml-latest-small" / "ratings.csv").write_bytes(RATINGS.encode())
    (tmp_path / "some.zip").write_bytes(small_zip())
    for path in ("folder", "folder/ml-latest-small", "some.zip"):
        facts = json.loads(run("info", path, "--json")[1])
        assert (facts["rows"], facts["users"], facts["items"]) == (3, 2, 2)
    assert "3 ratings, 2 users, 2 items" in run("info", "some.zip")[1]


def test_info_with_a_check_says_what_was_read(run, tmp_path):
    (tmp_path / "r.csv").write_text("user,rating\n1,2\n2,3\n")
    assert run("info", "r.csv", "--check")[1].endswith("r.csv: 2 records of csv, all can be read\n")
    (tmp_path / "r.csv").write_text("user,rating\n1,2\n2,3,4\n")
    code, out, err = run("info", "r.csv", "--check")
    assert (code, "r.csv: record 1: it has 3 values" in out) == (2, True)
    refused((code, "", err), "r.csv: 1 of 2 records cannot be read")


@pytest.mark.parametrize("command", [("info",), ("shard", "--out", "s")])
def test_a_compressed_file_is_called_so(run, tmp_path, command):
    (tmp_path / "r.csv.gz").write_bytes(gzip.compress(b"x,y\n1,2\n"))
    refused(
        run(*command, "r.csv.gz"), "r.csv.gz is of no kind", "HINT: a decompressed copy", "gzip -dk"
    )


def test_info_with_a_check_of_what_has_none(run, tmp_path):
    (tmp_path / "input.txt").write_text("words")
    refused(run("info", ".", "--check"), "--check: . is text, which has no check", "data info .")


def test_info_of_a_text(run, tmp_path):
    (tmp_path / "input.txt").write_text("to be")
    assert run("info", tmp_path)[1] == f"{tmp_path}: text, 5 bytes\n"


@needs_shared
def test_real_shakespeare(run):
    assert (
        "input.txt: copied 1,115,394 bytes"
        in run("get", "shakespeare", "--from", SHARED / "shakespeare")[2]
    )
    assert run("info", "shakespeare")[1] == "data/shakespeare: text, 1,115,394 bytes\n"


def test_info_by_name_needs_the_files(run):
    refused(run("info", "mnist"), "mnist is not in data/mnist", "stepladder data get mnist")


BAD = {
    "text": (b"hello, world", "bad is of no kind that is known. HINT: give what open_data"),
    "empty": (b"", "bad is of no kind that is known"),
    "zip without ratings": (b"PK\5\6" + b"\0" * 18, "holds no ratings.csv"),
    "damaged zip": (small_zip().replace(b"userId", b"userID", 1), "Bad CRC-32"),
}


@pytest.mark.parametrize("data, message", BAD.values(), ids=BAD)
def test_info_of_a_bad_file(run, tmp_path, data, message):
    (tmp_path / "bad").write_bytes(data)
    refused(run("info", "bad"), "bad", message)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "ratings.csv has the columns , and not userId, movieId, rating"),
        (b"a,b\n1,2\n", "ratings.csv has the columns a, b, and not userId, movieId, rating"),
        (b"userId,movieId,rating\n1\n", "ratings.csv, line 2 is broken: 1 columns instead of 3"),
        (b"userId,movieId,rating\n\xff,1\n", "can't decode byte 0xff"),
    ],
    ids=["empty", "columns", "row", "bytes"],
)
def test_info_of_bad_ratings(run, tmp_path, text, message):
    (tmp_path / "ratings.csv").write_bytes(text)
    refused(run("info", "."), "ratings.csv", message)


def test_info_of_nothing(run, tmp_path):
    refused(run("info", "nowhere"), "no file, folder or data set 'nowhere'")
    refused(run("info", tmp_path), "holds neither MNIST files nor ratings.csv")
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"")
    refused(
        run("info", tmp_path), "train-images-idx3-ubyte.gz is missing", "data get mnist --data-dir"
    )


@needs_shared
def test_real_mnist(run):
    code, _, _ = run("get", "mnist", "--from", SHARED / "mnist")
    assert code == 0
    facts = json.loads(run("info", "mnist", "--json")[1])
    train, labels, test, _ = facts["files"]
    assert (train["rows"], test["rows"]) == (60000, 10000)
    assert (round(train["mean"], 4), round(train["std"], 4)) == (0.1307, 0.3081)
    assert labels["labels"] == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert facts["bytes"] == 11594722


@needs_shared
def test_real_movielens(run):
    code, out, _ = run("get", "movielens-small", "--from", SHARED / "movielens" / "ml-latest-small")
    assert code == 0
    assert "research use only" in out
    facts = json.loads(run("info", "movielens-small", "--json")[1])
    assert (facts["rows"], facts["users"], facts["items"]) == (100836, 610, 9724)
