"""`stepladder explain`: messages as torch and Linux write them here are known, in an argument, a
log or a pipe.
"""

from __future__ import annotations

import json
import re
import socket
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import torch.distributed as dist

from pages import documented_keys
from stepladder.cli import cli
from stepladder.tools.explain.explain import KnownError, explain, known_errors

KNOWN = known_errors()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def bind_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        dist.TCPStore("127.0.0.1", first.getsockname()[1], is_master=True)  # type: ignore[attr-defined]


def load_a_class(folder: Path) -> None:
    torch.save(KNOWN[0], folder / "class.pt")
    torch.load(folder / "class.pt")


def change_in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def load_a_wrapped_model() -> None:
    torch.nn.Linear(1, 1).load_state_dict(
        {"module.weight": torch.ones(1, 1), "module.bias": torch.ones(1)}
    )


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (bind_twice, "MASTER_PORT"),
        (partial(dist.init_process_group, "gloo"), "nobody has started it"),
        (partial(dist.all_reduce, torch.ones(1)), "before init_process_group"),
        (partial(torch.nn.BatchNorm1d(1), torch.ones(1, 1)), "batch of one sample"),
        (change_in_place, "changed after forward"),
        (load_a_wrapped_model, "`module.`"),
        (partial(socket.socket(socket.AF_UNIX).bind, "x" * 200), "path of a socket"),
    ],
)
def test_what_is_raised_here_is_known(
    call: Callable[[], object], cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    occurrences = list(explain(raised(call).splitlines()))
    assert any(cause in occurrence.cause for occurrence in occurrences), occurrences


def test_a_file_with_a_class_is_known(tmp_path: Path) -> None:
    assert (
        "holds a class" in next(explain(raised(partial(load_a_class, tmp_path)).splitlines())).cause
    )


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: error.texts[0][:40])
def test_each_message_is_found_alone_and_in_a_line(error: KnownError) -> None:
    for text in error.texts:
        for line in (text, text.upper(), f"[rank1]: RuntimeError:   {text} (code 7)"):
            assert (error.cause, error.do) in [(f.cause, f.fix) for f in explain([line])], line


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: error.texts[0][:40])
def test_what_to_type_is_there(error: KnownError) -> None:
    context = click.Context(cli)
    for command_line in re.findall(r"stepladder ((?:\w+)(?: [^;:,]+)?)", error.do):
        command = cli.get_command(context, command_line.split()[0])
        assert command is not None, command_line
        flags = {flag for param in command.params for flag in param.opts}
        assert set(re.findall(r"--[\w-]+", command_line)) <= flags, command_line


@pytest.mark.slow
def test_a_log_is_looked_through_and_each_message_told_once(
    stepladder: Any, tmp_path: Path
) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(b"step 1\n\xff\n" + b"CUDA out of memory. Tried\n" * 3 + b"Broken pipe\n")
    done = stepladder("explain", log)
    assert done.returncode == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines() if line.startswith("line")] == [
        "line 3",
        "line 6",
    ]
    output = json.loads(stepladder("explain", log, "--json").stdout)
    assert [occurrence["line"] for occurrence in output["found"]] == [3, 6]
    assert output.keys() | output["found"][0].keys() == documented_keys("explain")


def test_what_is_not_known_says_where_to_look(stepladder: Any) -> None:
    done = stepladder("explain", "the weather is bad")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        "stepladder: no known error message is in it. HINT: stepladder explain --list "
    )
    assert json.loads(stepladder("explain", "the weather is bad", "--json").stdout) == {
        "schema": 1,
        "found": [],
    }


def test_a_part_of_a_message_is_enough_but_no_single_word(stepladder: Any) -> None:
    assert "OS" not in [occurrence.evidence for occurrence in explain(["OS", "in", "the"])]
    assert stepladder("explain", "already in use").returncode == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nccl timeout", "Watchdog caught collective operation timeout"),
        ("ProcessGroupNCCL timed out", "Watchdog caught collective operation timeout"),
        ("cuda oom", "CUDA out of memory"),
        ("unexpected keys in state dict", "Unexpected key(s) in state_dict"),
        ("port in use", "Address already in use"),
    ],
)
def test_some_words_of_a_message_are_enough(text: str, message: str, stepladder: Any) -> None:
    done = stepladder("explain", text)
    assert done.returncode == 0 and f"perhaps: {message}\n" in done.stdout


def test_words_of_a_log_are_no_message(stepladder: Any, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("the nccl backend has a timeout of 600 s\n")
    assert stepladder("explain", "job.log").returncode == 1


def test_all_that_is_known_is_listed(stepladder: Any) -> None:
    lines = stepladder("explain", "--list").stdout.splitlines()
    assert len(lines) == sum(len(error.texts) for error in KNOWN) and "torch: EADDRINUSE" in lines


@pytest.mark.parametrize("name", ["/dev/zero", "/", ".", "huge"])
def test_what_is_no_log_is_refused(name: str, stepladder: Any, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    done = stepladder("explain", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "HINT: a text file" in done.stderr
