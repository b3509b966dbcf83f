"""Who reaches a rendezvous can neither run code in a launch nor speak for one of its nodes."""

from __future__ import annotations

import json
import os
import pickle
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

from processes import run
from stepladder.core.address import free_port
from stepladder.core.signed import SECRET, Forged, secret_in, sign
from stepladder.launcher.nodes import launch
from stepladder.launcher.nodes.generation import Generation
from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.trust import SignedBackend, script_secret
from stepladder.rank.exit_record import END_FILE


class Evil:
    """What a stranger would have a launch unpickle: it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def test_what_another_node_has_set_is_read_and_the_token_goes_on() -> None:
    store = HashStore()
    first, second = (SignedBackend(C10dRendezvousBackend(store, "run"), "secret") for _ in range(2))
    assert first.get_state() is None
    state = pickle.dumps(_RendezvousState())
    set_by_first = first.set_state(state)
    assert set_by_first is not None and set_by_first[0] == state and set_by_first[2]
    found = second.get_state()
    assert found is not None and found[0] == state
    replaced = second.set_state(pickle.dumps(_RendezvousState()), found[1])
    assert replaced is not None and replaced[2]
    late = first.set_state(state, set_by_first[1])
    assert late is not None and (late[0] == replaced[0])


@pytest.mark.parametrize("signed_with", [None, "another", "", "secret"])
@pytest.mark.parametrize("secret", ["secret", ""])
def test_a_strangers_pickle_is_never_loaded(tmp_path: Path, secret: str, signed_with: str | None) -> None:
    store, mark = HashStore(), tmp_path / "mark"
    pickled = pickle.dumps(Evil(mark))
    state = pickled if signed_with is None else sign(signed_with, pickled)
    store.set("torch.rendezvous.run", b64encode(state).decode())
    backend = SignedBackend(C10dRendezvousBackend(store, "run"), secret)
    with pytest.raises(Forged):
        backend.get_state()
    with pytest.raises(Forged):
        backend.set_state(pickle.dumps(_RendezvousState()))
    assert not mark.exists()


@pytest.mark.parametrize("said", ["", "?", json.dumps({"nproc": 1}), b64encode(sign("another", b"{}")).decode()])
def test_nobody_else_can_introduce_a_node(said: str) -> None:
    store = HashStore()
    store.set("stepladder/node-1", said)
    with pytest.raises(Forged):
        Peers(store, 0, 2, "secret").introduce(Introduction(1, master=("127.0.0.1", 1)))


def test_a_script_s_launch_takes_its_secret_from_where_nodes_share_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SECRET, END_FILE):
        monkeypatch.delenv(name, raising=False)
    assert script_secret() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv(END_FILE, f"7:{tmp_path}/job/ended.json")
    of_job = script_secret()
    assert of_job == script_secret() == secret_in(tmp_path / "job" / "rendezvous.secret")
    monkeypatch.setenv(SECRET, "given")
    assert script_secret() == "given" and SECRET not in os.environ  # a script has no need of it


def test_a_job_s_launch_is_signed_with_the_secret_of_its_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(serve: Callable[[int], int], _check: object) -> Generation:
        return Generation(1, "127.0.0.1", serve(0))

    monkeypatch.setattr(launch, "meeting_over", lambda *meant: meant[-1])
    at: Any = SimpleNamespace(join=join, run_dir=tmp_path, address="127.0.0.1", timeout=5.0)
    assert launch.open_generation(at, (2, 2), lambda: None) == secret_in(tmp_path / "rendezvous.secret")


@pytest.mark.ranks
def test_a_stranger_who_was_first_at_the_port_ends_a_launch_with_one_line(tmp_path: Path) -> None:
    mark, port, script = tmp_path / "mark", free_port(), tmp_path / "script.py"
    script.write_text("raise SystemExit('ranks must not start')")
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.set("torch.rendezvous.none", b64encode(pickle.dumps(Evil(mark))).decode())
    endpoint = f"127.0.0.1:{port}"
    flags = ["--nodes", "2", "--nproc", "1", "--rdzv-endpoint", endpoint, "--local-addr", "127.0.0.1"]
    ended = run("run", *flags, script, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.strip().count("\n") == 0, ended.stderr
    assert f"something else than this launch writes to the rendezvous at {endpoint}" in ended.stderr
    assert not mark.exists()
