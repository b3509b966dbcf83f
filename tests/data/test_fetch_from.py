import hashlib
import io
import random
import tarfile
import zipfile

import pytest

from stepladder.core.errors import InputError
from stepladder.data.fetch import download
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.local_files import Feedback

BODY = random.Random(0).randbytes(700_000)
WRONG = b"?" + BODY[1:]


def data_set(files: dict[str, bytes]) -> DataSet:
    """A data set of these files that no mirror has."""
    remote = (
        RemoteFile(name, len(data), hashlib.sha256(data).hexdigest(), ())
        for name, data in files.items()
    )
    return DataSet("tiny", tuple(remote), "free", "nobody")


ONE = data_set({"f.bin": BODY})
TWO = data_set({"f.bin": BODY, "g.bin": b"second"})


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make_source(kind: str, folder, files: dict[str, bytes]):
    """files in a folder, or in an archive below a folder of their own."""
    if kind == "folder":
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return folder
    path = folder / f"all.{kind}"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(f"top/{name}", data)
        return path
    with tarfile.open(path, f"w:{kind.removeprefix('tar.').removeprefix('tar')}") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"./top/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


KINDS = ["folder", "zip", "tar", "tar.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_from_brings_all_files_and_replaces_wrong_ones(tmp_path, kind):
    target = tmp_path / "target"
    messages = []
    target.mkdir()
    (target / "f.bin").write_bytes(WRONG)
    download.fetch_dataset(
        TWO,
        target,
        make_source(kind, tmp_path, {"f.bin": BODY, "g.bin": b"second"}),
        Feedback(on_message=messages.append),
    )
    assert (target / "f.bin").read_bytes() == BODY
    assert names(target) == ["f.bin", "g.bin"]
    assert messages[0].endswith("f.bin: the sha256 is wrong, replacing it")


@pytest.mark.parametrize("kind", KINDS)
def test_from_with_a_file_lacking_writes_nothing(tmp_path, kind):
    source = make_source(kind, tmp_path, {"f.bin": BODY})
    with pytest.raises(InputError, match=f"{source} does not hold g.bin"):
        download.fetch_dataset(TWO, tmp_path / "target", source)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data, message",
    [(WRONG, "sha256 is wrong"), (BODY[:9], "after 9 of"), (BODY + b"!", "more than the 700,000")],
)
def test_from_with_wrong_bytes_keeps_what_was_there(tmp_path, kind, data, message):
    target = tmp_path / "target"
    target.mkdir()
    (target / "f.bin").write_bytes(b"old")
    with pytest.raises(InputError, match=rf"cannot use f\.bin from .*{message}"):
        download.fetch_dataset(ONE, target, make_source(kind, tmp_path, {"f.bin": data}))
    assert names(target) == ["f.bin"]


@pytest.mark.parametrize("name", ["f.bin", "another name"])
def test_from_the_single_file(tmp_path, name):
    (tmp_path / name).write_bytes(BODY)
    download.fetch_dataset(ONE, tmp_path / "target", tmp_path / name)
    assert (tmp_path / "target" / "f.bin").read_bytes() == BODY


def test_from_one_file_completes_a_set(tmp_path):
    target = tmp_path / "target"
    download.fetch_dataset(
        ONE, target, make_source("folder", tmp_path, {"f.bin": BODY, "g.bin": b"second"})
    )
    download.fetch_dataset(TWO, target, tmp_path / "g.bin")
    assert names(target) == ["f.bin", "g.bin"]


def test_from_nowhere(tmp_path):
    with pytest.raises(InputError, match=r"there is no .*nowhere"):
        download.fetch_dataset(ONE, tmp_path, tmp_path / "nowhere")


def test_from_a_damaged_zip(tmp_path):
    source = make_source("zip", tmp_path, {"f.bin": BODY, "g.bin": b"second"})
    data = source.read_bytes()
    source.write_bytes(data[:5000] + b"\0\0\0" + data[5003:])
    with pytest.raises(InputError, match=r"cannot use f\.bin from .*all\.zip: Bad CRC-32"):
        download.fetch_dataset(TWO, tmp_path / "target", source)


def test_from_into_an_unwritable_target(tmp_path):
    source = make_source("folder", tmp_path, {"f.bin": BODY})
    with pytest.raises(InputError, match=r"cannot write .*/f\.bin/sub: Not a directory"):
        download.fetch_dataset(ONE, tmp_path / "f.bin" / "sub", source)


def test_archive_in_the_set_is_unpacked_beside(tmp_path):
    source = make_source("zip", tmp_path, {"a.csv": b"aaa"})
    data = source.read_bytes()
    file = RemoteFile("top.zip", len(data), hashlib.sha256(data).hexdigest(), (), unpack=True)
    target = tmp_path / "target"
    download.fetch_dataset(DataSet("tiny", (file,), "free", "nobody"), target, source)
    assert names(target) == ["top", "top.zip"]
    assert (target / "top" / "a.csv").read_bytes() == b"aaa"
