"""Who reaches a rendezvous can neither run code in a launch nor speak for one of its nodes."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousState

import pickles as p
from processes import run, wait_until
from stepladder.core.address import find_free_port
from stepladder.core.signing import SECRET_VARIABLE, ForgedError, load_or_make_secret, sign
from stepladder.launcher.nodes import launch
from stepladder.launcher.nodes.generation import Generation
from stepladder.launcher.nodes.local_node import NodeInfo
from stepladder.launcher.nodes.peers import Peers
from stepladder.launcher.nodes.signed_backend import SignedBackend


class Evil:
    """What a stranger would have a launch unpickle: it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> object:
        return Path.touch, (self.mark,)


def test_what_another_node_has_set_is_read_and_the_token_goes_on() -> None:
    store = HashStore()
    first, second = (
        SignedBackend(C10dRendezvousBackend(store, "run"), "secret", "run") for _ in range(2)
    )
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
def test_a_strangers_pickle_is_never_loaded(
    tmp_path: Path, secret: str, signed_with: str | None
) -> None:
    store = HashStore()
    mark = tmp_path / "mark"
    pickled = pickle.dumps(Evil(mark))
    state = (
        pickled if signed_with is None else sign(signed_with, "rendezvous/run", bytes(8) + pickled)
    )
    store.set("torch.rendezvous.run", b64encode(state).decode())
    backend = SignedBackend(C10dRendezvousBackend(store, "run"), secret, "run")
    with pytest.raises(ForgedError):
        backend.get_state()
    with pytest.raises(ForgedError):
        backend.set_state(pickle.dumps(_RendezvousState()))
    assert not mark.exists()


@pytest.mark.parametrize("key", ["stepladder/drawn-1", "stepladder/node-1"])
@pytest.mark.parametrize("said", ["", "?", json.dumps({"nproc": 1}), "signed by another"])
def test_nobody_else_can_introduce_a_node(key: str, said: str) -> None:
    store = HashStore()
    if said == "signed by another":
        said = b64encode(sign("another", key, b"{}")).decode()
    store.set("stepladder/drawn-1", b64encode(sign("secret", "stepladder/drawn-1", b"1")).decode())
    store.set(key, said)
    with pytest.raises(ForgedError):
        Peers(store, 0, 2, "secret").introduce(NodeInfo(1, master=("127.0.0.1", 1)))


MODULE = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
CLASS = p.name(MODULE, "_RendezvousState")
NODE = p.name(MODULE, "_NodeDesc")
FOREIGN_STATES = {
    "BUILD on a class": CLASS + p.value((None, {"closed": True})) + p.BUILD,
    "BUILD with another field": CLASS
    + p.EMPTY_TUPLE
    + p.NEWOBJ
    + p.value({"__class__": 1})
    + p.BUILD,
    "BUILD with slots": CLASS + p.EMPTY_TUPLE + p.NEWOBJ + p.value((None, {"round": 1})) + p.BUILD,
    "BUILD of a set": NODE + p.EMPTY_TUPLE + p.NEWOBJ + p.value({"addr"}) + p.BUILD,
    "OBJ": p.MARK + CLASS + p.OBJ,
    "NEWOBJ_EX": CLASS + p.EMPTY_TUPLE + p.EMPTY_DICT + p.NEWOBJ_EX,
    "EXT1": b"\x82\x01",
    "BINPERSID": p.value("x") + p.BINPERSID,
    "another class": NODE + p.EMPTY_TUPLE + p.NEWOBJ,
    "a text": p.value("x"),
    "nothing": b"",
}


@pytest.mark.parametrize("kind", FOREIGN_STATES)
def test_what_is_no_state_of_a_rendezvous_is_forged_also_where_no_secret_is_shared(
    kind: str,
) -> None:
    store = HashStore()
    before = dict(vars(_RendezvousState))
    state = bytes(8) + p.PROTOCOL + FOREIGN_STATES[kind] + p.STOP
    store.set("torch.rendezvous.run", b64encode(sign("", "rendezvous/run", state)).decode())
    with pytest.raises(ForgedError):
        SignedBackend(C10dRendezvousBackend(store, "run"), "", "run").get_state()
    assert dict(vars(_RendezvousState)) == before


# -- somebody who reads the store, and writes signed words of the launch's own back ----------------


def started(store: HashStore, *infos: NodeInfo) -> list[Peers]:
    """The nodes of one start."""
    nodes = [Peers(store, number, len(infos), "secret") for number in range(len(infos))]
    with ThreadPoolExecutor(len(infos)) as threads:
        list(threads.map(Peers.introduce, nodes, infos))
    return nodes


def test_the_word_of_a_node_under_another_key_is_forged() -> None:
    """So node 1 seems to come a second time, and its seat is given up when the second one is
    silent.
    """
    store = HashStore()
    first, _ = started(store, NodeInfo(1, node_id=0), NodeInfo(1, node_id=1))
    store.set("stepladder/start-0/node-2", store.get("stepladder/start-0/node-1"))
    with pytest.raises(ForgedError):
        first.add_joined_nodes()
    assert first.node_ids == {0: 0, 1: 1}


def test_a_word_of_an_earlier_start_is_waited_out_not_believed() -> None:
    store = HashStore()
    started(store, NodeInfo(1, node_id=0), NodeInfo(1, node_id=1, liveness_address=("old", 1)))
    old = {key: store.get(f"stepladder/{key}") for key in ("node-1", "drawn-1")}
    new = (
        NodeInfo(1, attempt=0, node_id=0),
        NodeInfo(1, attempt=0, node_id=5, liveness_address=("new", 2)),
    )
    first, second = (Peers(store, number, 2, "secret") for number in range(2))
    for key, value in old.items():
        store.set(f"stepladder/{key}", value)
    with ThreadPoolExecutor(2) as threads:
        earlier = threads.submit(first.introduce, new[0])
        wait_until(lambda: store.get("stepladder/drawn-0") and not earlier.done())
        threads.submit(second.introduce, new[1]).result()
        earlier.result()
    assert (first.node_ids[1], first.liveness_addresses[1]) == (5, ("new", 2))


def test_a_start_whose_old_words_are_put_back_for_ever_ends() -> None:
    store = HashStore()
    started(store, NodeInfo(1), NodeInfo(1))
    late = iter([0.0, 0.0, 1e9, 1e9])  # the store's patience is over at the second look
    with pytest.raises(DistError):
        Peers(store, 0, 2, "secret", clock=lambda: next(late)).introduce(NodeInfo(1, attempt=0))


@pytest.mark.parametrize(
    "key", ["broken", "failed", "ended", "ended-1", "lost-1", "group-1/called", "group-1/refused"]
)
@pytest.mark.parametrize("value", ["", "1", "of another key"])
def test_an_unsigned_flag_or_counter_restarts_and_ends_nothing(key: str, value: str) -> None:
    store = HashStore()
    first, _ = started(store, NodeInfo(1), NodeInfo(1))
    first.board.write("left-0")
    copied = store.get("stepladder/start-0/left-0").decode()
    store.set(f"stepladder/start-0/{key}", copied if value == "of another key" else value)
    with pytest.raises(ForgedError):
        first.board.has(key)


def test_nothing_that_nodes_read_is_a_bare_counter() -> None:
    """`add` on any key that a launch uses leaves what it does not take for its own."""
    store = HashStore()
    first, second = started(store, NodeInfo(1), NodeInfo(1))
    second.find_silent_node()
    store.add("stepladder/start-0/alive-2", 1)
    for node in (first, second):
        assert (
            node.find_silent_node(limit=1e9) is None
        )  # nobody listens to a node that is not there
    store.set("stepladder/start-0/alive-1", "7")
    first._last_beat_at -= 2
    with pytest.raises(ForgedError):
        first.find_silent_node()


def test_a_beat_that_is_put_back_is_noticed_by_the_listener_and_by_its_node() -> None:
    store = HashStore()
    now = [100.0]
    nodes = [Peers(store, number, 2, "secret", clock=lambda: now[0]) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Peers.introduce, nodes, [NodeInfo(1)] * 2))
    first, second = nodes
    second.find_silent_node()
    old = store.get("stepladder/start-0/alive-1")
    now[0] += 2
    second.find_silent_node()
    first.find_silent_node()
    store.set("stepladder/start-0/alive-1", old)
    now[0] += 2
    for node in (first, second):
        with pytest.raises(ForgedError):
            node.find_silent_node()


def test_a_new_rank_has_a_number_of_its_own_whatever_is_counted_in_the_store() -> None:
    store = HashStore()
    first, second = started(store, NodeInfo(2), NodeInfo(1))
    numbers = [first.claim_rank(), second.claim_rank()]
    store.add("stepladder/start-0/ranks", -5)
    assert [*numbers, first.claim_rank(), second.claim_rank()] == [3, 4, 5, 6]


def test_a_state_of_the_rendezvous_that_is_put_back_is_forged() -> None:
    store = HashStore()
    key = "torch.rendezvous.run"
    first, second = (
        SignedBackend(C10dRendezvousBackend(store, "run"), "secret", "run") for _ in range(2)
    )
    found = first.set_state(pickle.dumps(_RendezvousState()))
    old = store.get(key)
    assert found is not None and first.set_state(pickle.dumps(_RendezvousState()), found[1])
    assert second.get_state()
    store.set(key, old)
    for backend in (first, second):
        with pytest.raises(ForgedError):
            backend.get_state()


def test_a_state_of_another_rendezvous_of_the_launch_is_forged() -> None:
    store = HashStore()
    SignedBackend(C10dRendezvousBackend(store, "1"), "secret", "1").set_state(
        pickle.dumps(_RendezvousState())
    )
    store.set("torch.rendezvous.2", store.get("torch.rendezvous.1"))
    with pytest.raises(ForgedError):
        SignedBackend(C10dRendezvousBackend(store, "2"), "secret", "2").get_state()


# -- the secret ------------------------------------------------------------------------------------

SHOWS_SECRET = "import os; print('ranks see', os.environ.get('STEPLADDER_SECRET'))"


@pytest.mark.ranks
def test_no_rank_gets_the_secret(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHOWS_SECRET)
    done = run("run", "--nproc", 2, "script.py", cwd=tmp_path, env={SECRET_VARIABLE: "a secret"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ranks see None") == 2


def test_a_script_of_an_allocation_gets_a_secret_that_is_new_each_time(tmp_path: Path) -> None:
    """Which srun hands on to all nodes, and a port that nobody can know from the job's number."""
    commands = {
        "srun": 'echo "srun $STEPLADDER_SECRET $*"',
        "scontrol": "case $2 in job) echo JobState=RUNNING;; node) echo NodeAddr=10.0.0.7;; *) echo n1;; esac",
    }
    for name, text in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "x.py").touch()
    secrets = []
    ports = []
    for arguments in (("run", "x.py"), ("run", "x.py"), ("train", "mlp")):
        done = run(*arguments, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        secrets.append(done.stdout.split()[1])
        ports.append(int(done.stdout.partition("10.0.0.7:")[2].split()[0]))
        assert secrets[0] not in done.stderr
    assert [len(secret) for secret in secrets[:2]] == [64, 64] and secrets[0] != secrets[1]
    assert secrets[2] == "--nodes=2"  # `train` has a secret in its run directory
    assert len({*ports}) > 1 and all(20000 <= port < 32000 for port in ports)


def test_the_batch_script_of_a_script_draws_a_secret_for_each_start(tmp_path: Path) -> None:
    """In the environment of its srun: no file keeps it, and no later job has the same."""
    (tmp_path / "x.py").write_text("import torch.distributed\n")
    arguments = (
        "submit",
        "--dry-run",
        "--nodes",
        2,
        "--nproc",
        1,
        "--mem",
        "1G",
        "--",
        "run",
        "x.py",
    )
    script = run(*arguments, cwd=tmp_path)
    (line,) = [line for line in script.stdout.splitlines() if "STEPLADDER_SECRET" in line]
    shell = f"{line}\nenv | grep ^STEPLADDER_SECRET="
    drawn = [
        subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert all(re.fullmatch("STEPLADDER_SECRET=[0-9a-f]{64}\n", done.stdout) for done in drawn)
    assert drawn[0].stdout != drawn[1].stdout


def test_a_job_s_launch_is_signed_with_the_secret_of_its_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(serve: Callable[[int], int], _check: object) -> Generation:
        return Generation(1, "127.0.0.1", serve(0))

    monkeypatch.setattr(launch, "make_rendezvous", lambda *meant: meant[-1])
    at: Any = SimpleNamespace(join=join, run_dir=tmp_path, address="127.0.0.1", timeout=5.0)
    assert launch.open_generation(at, (2, 2), lambda: None) == load_or_make_secret(
        tmp_path / "rendezvous.secret"
    )


@pytest.mark.ranks
def test_a_stranger_who_was_first_at_the_port_ends_a_launch_with_one_line(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    port = find_free_port()
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('ranks must not start')")
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )
    store.set("torch.rendezvous.none", b64encode(pickle.dumps(Evil(mark))).decode())
    endpoint = f"127.0.0.1:{port}"
    flags = [
        "--nodes",
        "2",
        "--nproc",
        "1",
        "--rdzv-endpoint",
        endpoint,
        "--local-addr",
        "127.0.0.1",
    ]
    ended = run("run", *flags, script, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.strip().count("\n") == 0, ended.stderr
    assert f"something else than this launch writes to the rendezvous at {endpoint}" in ended.stderr
    assert not mark.exists()
