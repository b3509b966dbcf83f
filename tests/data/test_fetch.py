import fcntl
import hashlib
import random
import subprocess
import sys

import pytest

from processes import SECONDS
from stepladder.core.errors import InputError
from stepladder.data.fetch import catalog, download
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.local_files import Feedback

BODY = random.Random(0).randbytes(700_000)
WRONG = b"?" + BODY[1:]
DEAD = "http://127.0.0.1:9/f.bin"  # the discard port: nothing listens there


def one_file(*urls: str, body: bytes = BODY, name: str = "f.bin", unpack: bool = False) -> DataSet:
    file = RemoteFile(name, len(body), hashlib.sha256(body).hexdigest(), urls, unpack)
    return DataSet("tiny", (file,), "free", "nobody")


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_download(mirror, reply, tmp_path):
    messages = []
    steps = []
    dataset = one_file(mirror.serve("/f", reply(BODY)))
    paths = download.fetch_dataset(
        dataset,
        tmp_path / "new" / "dir",
        None,
        Feedback(lambda *step: steps.append(step), messages.append),
    )
    assert paths == [tmp_path / "new" / "dir" / "f.bin"]
    assert paths[0].read_bytes() == BODY
    assert names(paths[0].parent) == ["f.bin"]
    assert steps[-1] == ("f.bin", len(BODY), len(BODY))
    assert messages == ["f.bin: fetching 700,000 bytes"]


def test_right_file_is_kept_and_nothing_asked(mirror, tmp_path):
    (tmp_path / "f.bin").write_bytes(BODY)
    messages = []
    download.fetch_dataset(
        one_file(mirror.url("/f")), tmp_path, feedback=Feedback(on_message=messages.append)
    )
    assert mirror.requests == []
    assert messages == ["f.bin: here already"]


def test_wrong_file_is_named_and_fetched_again(mirror, reply, tmp_path):
    (tmp_path / "f.bin").write_bytes(WRONG)
    messages = []
    download.fetch_dataset(
        one_file(mirror.serve("/f", reply(BODY))),
        tmp_path,
        feedback=Feedback(on_message=messages.append),
    )
    assert messages[0] == f"{tmp_path / 'f.bin'}: the sha256 is wrong, replacing it"
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_cut_connection_is_tried_again_from_its_beginning(mirror, reply, tmp_path):
    url = mirror.serve("/f", reply(BODY, cut=300_000), reply(BODY, cut=0), reply(BODY))
    download.fetch_dataset(one_file(url), tmp_path)
    assert mirror.requests == ["/f", "/f", "/f"]
    assert (tmp_path / "f.bin").read_bytes() == BODY


def test_next_mirror_starts_at_the_beginning(mirror, reply, tmp_path):
    first = mirror.serve("/1", reply(BODY, cut=300_000), reply(status=500))
    download.fetch_dataset(one_file(first, mirror.serve("/2", reply(BODY))), tmp_path)
    assert mirror.requests == ["/1", "/1", "/2"]
    assert (tmp_path / "f.bin").read_bytes() == BODY


@pytest.mark.parametrize(
    "part", [BODY, BODY + b"more", WRONG[:1000]], ids=["complete", "more", "less"]
)
def test_part_of_a_killed_run_is_replaced(mirror, reply, tmp_path, part):
    (tmp_path / "f.bin.part").write_bytes(part)
    download.fetch_dataset(one_file(mirror.serve("/f", reply(BODY))), tmp_path)
    assert (tmp_path / "f.bin").read_bytes() == BODY
    assert names(tmp_path) == ["f.bin"]


def test_corrupt_mirror_is_dropped_for_the_next(mirror, reply, tmp_path):
    dataset = one_file(mirror.serve("/1", reply(WRONG)), mirror.serve("/2", reply(BODY)))
    download.fetch_dataset(dataset, tmp_path)
    assert mirror.requests == ["/1", "/2"]


def test_corrupt_only_mirror_leaves_nothing(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="the sha256 is wrong"):
        download.fetch_dataset(one_file(mirror.serve("/f", reply(WRONG))), tmp_path)
    assert names(tmp_path) == []


def test_mirror_that_always_cuts_ends(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="stopped after 500,000 of 700,000 bytes"):
        download.fetch_dataset(one_file(mirror.serve("/f", reply(BODY, cut=500_000))), tmp_path)
    assert len(mirror.requests) == download.ATTEMPTS_PER_MIRROR
    assert names(tmp_path) == []


def test_longer_answer_is_stopped(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="more than the 700,000 bytes expected"):
        download.fetch_dataset(
            one_file(mirror.serve("/f", reply(BODY * 3, length=False))), tmp_path
        )
    assert names(tmp_path) == []


def test_answer_of_another_size_is_refused(mirror, reply, tmp_path):
    with pytest.raises(InputError, match="offers 9 bytes instead of 700,000"):
        download.fetch_dataset(one_file(mirror.serve("/f", reply(b"<please/>"))), tmp_path)
    assert names(tmp_path) == []


def test_redirect_is_followed(mirror, reply, tmp_path):
    mirror.serve("/real", reply(BODY))
    download.fetch_dataset(
        one_file(mirror.serve("/f", reply(status=302, location="/real"))), tmp_path
    )
    assert mirror.requests == ["/f", "/real"]


def test_all_mirrors_failing_is_one_line_with_each_reason(mirror, reply, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "DOWNLOAD_TIMEOUT_S", 5.0)  # only one of the mirrors needs it
    loop = mirror.serve("/loop", reply(status=302, location="/loop"))
    stall = mirror.serve("/stall", reply(BODY, stall=True, cut=0))
    with pytest.raises(InputError) as caught:
        bad = one_file(DEAD, mirror.url("/none"), loop, stall, "http://127.0.0.1:x/f")
        download.fetch_dataset(bad, tmp_path / "new" / "folder")
    host = f"127.0.0.1:{mirror.server_port}"
    problem = caught.value.problem
    assert "127.0.0.1:9: Connection refused; " in problem
    assert f"{host}: HTTP 404 Not Found; {host}: HTTP 302 " in problem
    assert f"{host}: timed out; 127.0.0.1:x: " in problem
    assert "\n" not in str(caught.value)
    assert caught.value.hint.endswith("stepladder data get tiny --from PATH")
    assert names(tmp_path) == []


def test_second_writer_is_refused(tmp_path):
    with (tmp_path / "f.bin.part").open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"f\.bin\.part is being written by another process"):
            download.fetch_dataset(one_file(DEAD), tmp_path)


def test_full_disk_names_the_path_and_leaves_nothing(mirror, reply, tmp_path):
    dataset = one_file(mirror.serve("/f", reply(BODY)))
    code = (
        "import resource; from pathlib import Path; from stepladder.data.fetch.catalog import *\n"
        "from stepladder.data.fetch.download import fetch_dataset\n"
        "from stepladder.core.errors import InputError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"try: fetch_dataset({dataset!r}, Path({str(tmp_path)!r}))\n"
        "except InputError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout.startswith(
        f"cannot write {tmp_path / 'f.bin.part'}: File too large. HINT: free some space"
    )
    assert names(tmp_path) == []


def test_unwritable_target(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*/file/sub: Not a directory"):
        download.fetch_dataset(one_file(DEAD), tmp_path / "file" / "sub")


def test_catalogue_is_complete():
    for name, dataset in catalog.CATALOG.items():
        assert dataset.name == name
        assert dataset.licence
        for file in dataset.files:
            assert len(file.sha256) == 64
            assert all(url.endswith(f"/{file.name}") for url in file.urls)


def test_unknown_name_lists_the_known():
    with pytest.raises(InputError, match="no data set 'cifar', known are: mnist, movielens-small"):
        catalog.find_dataset("cifar")
