import fcntl
import hashlib
import random
import subprocess
import sys

import pytest

from processes import SECONDS
from stepladder.core.errors import InputError
from stepladder.data.disk import Feedback
from stepladder.data.fetch import catalog, fetch
from stepladder.data.fetch.catalog import DataSet, RemoteFile

BODY = random.Random(0).randbytes(700_000)
WRONG = b"?" + BODY[1:]
DEAD = "http://127.0.0.1:9/f.bin"  # the discard port: nothing listens there


def one_file(*urls: str, body: bytes = BODY, name: str = "f.bin", unpack: bool = False) -> DataSet:
    file = RemoteFile(name, len(body), hashlib.sha256(body).hexdigest(), urls, unpack)
    return DataSet("tiny", (file,), "free", "nobody")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download(mirror, reply, tmp_path):
    said, steps = [], []
    dataset = one_file(mirror.serve("/f", reply(BODY)))
    paths = fetch.get(
        dataset,
        tmp_path / "new" / "dir",
        None,
        Feedback(lambda *step: steps.append(step), said.append),
    )
    assert paths == [tmp_path / "new" / "dir" / "f.bin"]
    assert paths[0].read_bytes() == BODY
    assert names(paths[0].parent) == ["f.bin"]
    assert steps[-1] == ("f.bin", len(BODY), len(BODY))
    assert said == ["f.bin: fetching 700,000 bytes"]


def test_right_file_is_kept_and_nothing_asked(mirror, tmp_path):
    (tmp_path / "f.bin").write_bytes(BODY)
    said = []
    fetch.get(one_file(mirror.url("/f")), tmp_path, feedback=Feedback(say=said.append))
    assert mirror.seen == []
    assert said == ["f.bin: here already"]


def test_wrong_file_is_named_and_fetched_again(mirror, reply, tmp_path):
    (tmp_path / "f.bin").write_bytes(WRONG)
    said = []
    fetch.get(
        one_file(mirror.serve("/f", reply(BODY))), tmp_path, feedback=Feedback(say=said.append)
    )
    assert said[0] == f"{tmp_path / 'f.bin'}: the sha256 is wrong, replacing it"
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_cut_connection_goes_on_where_it_stopped(mirror, reply, tmp_path):
    url = mirror.serve("/f", reply(BODY, cut=300_000), reply(BODY, cut=100_000), reply(BODY))
    fetch.get(one_file(url), tmp_path)
    assert [asked for _, asked in mirror.seen] == [None, "bytes=300000-", "bytes=400000-"]
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_next_run_goes_on_with_the_part_of_the_last(mirror, reply, tmp_path):
    dataset = one_file(mirror.serve("/f", reply(BODY, cut=300_000), reply(status=500), reply(BODY)))
    with pytest.raises(InputError, match="HTTP 500"):
        fetch.get(dataset, tmp_path)
    assert names(tmp_path) == ["f.bin.part"]
    fetch.get(dataset, tmp_path)
    assert mirror.seen[-1] == ("/f", "bytes=300000-")
    assert names(tmp_path) == ["f.bin"]


def test_next_mirror_goes_on_with_the_part_of_the_first(mirror, reply, tmp_path):
    first = mirror.serve("/1", reply(BODY, cut=300_000), reply(status=500))
    fetch.get(one_file(first, mirror.serve("/2", reply(BODY))), tmp_path)
    assert mirror.seen[-1] == ("/2", "bytes=300000-")


@pytest.mark.parametrize(
    "bad", [{"ranges": False}, {"shift": 7, "length": False}], ids=["ignored", "shifted"]
)
def test_server_that_mishandles_the_range_starts_anew(mirror, reply, tmp_path, bad):
    (tmp_path / "f.bin.part").write_bytes(BODY[:1000])
    fetch.get(one_file(mirror.serve("/f", reply(BODY, **bad))), tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    "part", [BODY, BODY + b"more", WRONG[:1000], WRONG], ids=["all", "more", "bad", "all bad"]
)
def test_any_part_left_behind_ends_in_the_right_file(mirror, reply, tmp_path, part):
    (tmp_path / "f.bin.part").write_bytes(part)
    fetch.get(one_file(mirror.serve("/f", reply(BODY))), tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert names(tmp_path) == ["f.bin"]
    assert (mirror.seen == []) == (part == BODY)


def test_corrupt_mirror_is_dropped_for_the_next(mirror, reply, tmp_path):
    dataset = one_file(mirror.serve("/1", reply(WRONG)), mirror.serve("/2", reply(BODY)))
    fetch.get(dataset, tmp_path)
    assert mirror.seen == [("/1", None), ("/2", None)]


def test_corrupt_only_mirror_leaves_nothing(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="the sha256 is wrong"):
        fetch.get(one_file(mirror.serve("/f", reply(WRONG))), tmp_path)
    assert names(tmp_path) == []


def test_corrupt_mirror_that_also_cuts_ends(mirror, reply, tmp_path):
    replies = [reply(WRONG, cut=500_000), reply(WRONG)] * 9
    with pytest.raises(InputError, match="no mirror gave"):
        fetch.get(one_file(mirror.serve("/f", *replies)), tmp_path)
    assert len(mirror.seen) == fetch.TRIES


def test_longer_answer_is_stopped(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="more than the 700,000 bytes expected"):
        fetch.get(one_file(mirror.serve("/f", reply(BODY * 3, length=False))), tmp_path)
    assert names(tmp_path) == []


def test_answer_of_another_size_costs_no_bytes(mirror, reply, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(BODY[:1000])
    with pytest.raises(InputError, match="offers 9 bytes instead of 700,000"):
        fetch.get(one_file(mirror.serve("/f", reply(b"<please/>", ranges=False))), tmp_path)
    assert (tmp_path / "f.bin.part").stat().st_size == 1000


def test_redirect_keeps_the_range(mirror, reply, tmp_path):
    (tmp_path / "f.bin.part").write_bytes(BODY[:1000])
    mirror.serve("/real", reply(BODY))
    url = mirror.serve("/f", reply(status=302, location="/real", ranges=False))
    fetch.get(one_file(url), tmp_path)
    assert mirror.seen == [("/f", "bytes=1000-"), ("/real", "bytes=1000-")]


def test_all_mirrors_failing_is_one_line_with_each_reason(mirror, reply, tmp_path, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT_SECONDS", 5.0)  # only one of the mirrors needs it
    loop = mirror.serve("/loop", reply(status=302, location="/loop"))
    stall = mirror.serve("/stall", reply(BODY, stall=True, cut=0))
    with pytest.raises(InputError) as caught:
        bad = one_file(DEAD, mirror.url("/none"), loop, stall, "http://127.0.0.1:x/f")
        fetch.get(bad, tmp_path / "new" / "folder")
    host, found = f"127.0.0.1:{mirror.server_port}", caught.value.problem
    assert "127.0.0.1:9: Connection refused; " in found
    assert f"{host}: HTTP 404 Not Found; {host}: HTTP 302 " in found
    assert f"{host}: timed out; 127.0.0.1:x: " in found
    assert "\n" not in str(caught.value)
    assert caught.value.hint.endswith("stepladder data get tiny --from PATH")
    assert names(tmp_path) == []


def test_second_writer_is_refused(tmp_path):
    with (tmp_path / "f.bin.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"f\.bin\.part is being written by another process"):
            fetch.get(one_file(DEAD), tmp_path)


def test_full_disk_names_the_path_and_keeps_the_part(mirror, reply, tmp_path):
    dataset = one_file(mirror.serve("/f", reply(BODY)))
    code = (
        "import resource; from pathlib import Path; from stepladder.data.fetch.catalog import *\n"
        "from stepladder.data.fetch.fetch import get; from stepladder.core.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"try: get({dataset!r}, Path({str(tmp_path)!r}))\n"
        "except InputError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout.startswith(
        f"cannot write {tmp_path / 'f.bin.part'}: File too large. HINT: make room"
    )
    assert (tmp_path / "f.bin.part").read_bytes() == BODY[:300_000]
    fetch.get(dataset, tmp_path)
    assert mirror.seen[-1] == ("/f", "bytes=300000-")
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_unwritable_target(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*/file/sub: Not a directory"):
        fetch.get(one_file(DEAD), tmp_path / "file" / "sub")


def test_catalogue_is_complete():
    for name, dataset in catalog.CATALOG.items():
        assert dataset.name == name
        assert dataset.licence
        for file in dataset.files:
            assert len(file.sha256) == 64
            assert all(url.endswith(f"/{file.name}") for url in file.urls)


def test_unknown_name_lists_the_known():
    with pytest.raises(InputError, match="no data set 'cifar', known are: mnist, movielens-small"):
        catalog.find("cifar")
