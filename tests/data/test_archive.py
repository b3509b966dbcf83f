import io
import stat
import tarfile
import zipfile

import pytest

from stepladder.core.errors import InputError
from stepladder.data.fetch.archive import unpack


def make_zip(path, members, mode=0):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def make_tar(path, name, data=b"", kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.type = kind
    info.linkname = link
    with tarfile.open(path, "w") as archive:
        archive.addfile(info, io.BytesIO(data))
    return path


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


FILES = {"set/": b"", "set/a.csv": b"aaa", "set/deep/b.csv": b"b", "other.txt": b"o"}
UNPACKED = {"a.csv": b"aaa", "deep/b.csv": b"b", "other.txt": b"o"}


def test_unpack_drops_the_leading_folder_and_leaves_no_other_file(tmp_path):
    unpack(make_zip(tmp_path / "set.zip", FILES), tmp_path / "set")
    assert tree(tmp_path / "set") == UNPACKED
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set", "set.zip"]


def test_unpack_tar(tmp_path):
    unpack(make_tar(tmp_path / "set.tar", "set/a.csv", b"aaa"), tmp_path / "set")
    assert tree(tmp_path / "set") == {"a.csv": b"aaa"}


def test_unpack_again_mends_lost_files_and_keeps_others(tmp_path):
    archive = make_zip(tmp_path / "set.zip", FILES)
    folder = tmp_path / "set"
    unpack(archive, folder)
    (folder / "mine.txt").write_bytes(b"mine")
    (folder / "deep" / "b.csv").unlink()
    (folder / "a.csv").write_bytes(b"half of it")
    unpack(archive, folder)
    assert tree(folder) == UNPACKED | {"mine.txt": b"mine"}


@pytest.mark.parametrize(
    "name", ["../evil", "set/../../evil", "/tmp/evil", "..\\evil", "C:\\evil", "C:evil"]
)
def test_zip_member_outside_is_refused_by_name(tmp_path, name):
    archive = make_zip(tmp_path / "set.zip", {"good": b"g", name: b"e"})
    refused(archive, tmp_path, name)


def test_zip_symlink_is_refused(tmp_path):
    archive = make_zip(tmp_path / "set.zip", {"link": b"/etc/passwd"}, stat.S_IFLNK | 0o777)
    refused(archive, tmp_path, "link")


@pytest.mark.parametrize("name", ["../evil", "/evil"])
def test_tar_member_outside_is_refused(tmp_path, name):
    refused(make_tar(tmp_path / "set.tar", name, b"e"), tmp_path, name)


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
def test_tar_link_or_device_is_refused(tmp_path, kind):
    refused(make_tar(tmp_path / "set.tar", "odd", kind=kind, link="/etc/passwd"), tmp_path, "odd")


def refused(archive, folder, name):
    with pytest.raises(InputError) as caught:
        unpack(archive, folder / "set")
    assert f"its member {name!r} is a link or would land outside" in caught.value.problem
    assert [p.name for p in folder.iterdir()] == [archive.name]


def test_damaged_member_leaves_the_folder_alone(tmp_path):
    archive = make_zip(tmp_path / "set.zip", {"a.csv": b"x" * 1000})
    archive.write_bytes(archive.read_bytes().replace(b"x" * 500, b"y" * 500, 1))
    with pytest.raises(InputError, match=r"cannot unpack a\.csv of .*set\.zip: Bad CRC-32"):
        unpack(archive, tmp_path / "set")
    assert [p.name for p in tmp_path.iterdir()] == ["set.zip"]


def test_not_an_archive(tmp_path):
    (tmp_path / "set.zip").write_bytes(b"hello")
    with pytest.raises(InputError, match=r"cannot read .*set\.zip"):
        unpack(tmp_path / "set.zip", tmp_path / "set")


def test_folder_that_cannot_be_made(tmp_path):
    archive = make_zip(tmp_path / "set.zip", FILES)
    (tmp_path / "set").write_bytes(b"a file")
    with pytest.raises(InputError, match=r"cannot write .*/set: "):
        unpack(archive, tmp_path / "set")
