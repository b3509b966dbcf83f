"""Rules that know several causes of the same thing: each is told by the words of the error."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines import WELL
from stepladder.tools.doctor.machine_facts import Facts
from stepladder.tools.doctor.programs import SHADOWS_MODULE
from stepladder.tools.doctor.rules import apply_rules


def no_torch(error: str) -> Facts:
    return replace(WELL, torch=replace(WELL.torch, version="", error=error))


@pytest.mark.parametrize(
    ("facts", "cause", "fix"),
    [
        (
            no_torch("/x/random.py" + SHADOWS_MODULE),
            "the folder that it is called in",
            "mv /x/random.py /x/my_random.py",
        ),
        (
            no_torch("libtorch_cpu.so: failed to map segment"),
            "a limit on memory",
            "ulimit -v unlimited",
        ),
        (no_torch("OpenBLAS error: Memory allocation still failed"), "a limit on memory", "noexec"),
        (
            no_torch("libc10.so: file too short"),
            "a library path that comes first",
            "LD_LIBRARY_PATH unset",
        ),
        (
            replace(WELL, port=29500, port_error="Address already in use"),
            "another run",
            "sport = :29500",
        ),
        (
            replace(WELL, port=99999, port_error="port must be 0-65535."),
            "end at 65535",
            "another port",
        ),
        (replace(WELL, port=80, port_error="Permission denied"), "below 1024", "another port"),
    ],
)
def test_the_cause_fits_what_was_said(facts: Facts, cause: str, fix: str) -> None:
    (finding,) = apply_rules(facts)
    assert cause in finding.cause
    assert fix in finding.fix
