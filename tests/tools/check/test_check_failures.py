"""Who is at fault for a rank that fails: the script, or the check's own probe and simulation."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepladder.tools.check.failure as failure
from stepladder.tools.check.failure import Folders, classify_failure

FOLDERS = Folders("/t/copy", "/home/u/work")
SCRIPT = '  File "/t/copy/train.py", line 7, in main\n    loss = net(x)\n           ^^^^^^\n'
TORCH = '  File "/v/site-packages/torch/nn/modules/module.py", line 1, in _call_impl\n    return forward_call(*args)\n'
CUDA = '  File "/v/site-packages/torch/cuda/memory.py", line 643, in memory_snapshot\n    return torch._C._cuda()\n'
PASSING = f'  File "{failure.CHECK_PREFIX}probe/hooks_model.py", line 9, in call\n    return original(module, *args)\n'
WRAPPED = f'  File "{failure.CHECK_PREFIX}probe/patching.py", line 9, in wrapper\n    return around(original, *args)\n'
# As it is written there: a line that says it otherwise would make the script's fault the check's.
CALLING = next(
    line
    for line in Path(failure.CHECK_PREFIX, "probe/hooks_model.py").read_text().splitlines()
    if "call(original, self" in line
)
OF_MODULES = (
    f'  File "{failure.CHECK_PREFIX}probe/hooks_model.py", line 9, in call_module\n{CALLING}\n'
)
PROBE = f'  File "{failure.CHECK_PREFIX}probe/hooks_train.py", line 9, in step\n    fields["norm"] = norm_of(parameters)\n'
SIMULATED = f'  File "{failure.CHECK_PREFIX}simulated_cuda.py", line 9, in __getattr__\n    raise NotSimulated(name)\n'
ASSERTION = '  File "/t/copy/train.py", line 8, in main\n    assert {}\n'
RAISE = '  File "/t/copy/train.py", line 9, in main\n    raise RuntimeError("No CUDA GPUs are available")\n'


def traceback(*frames: str, error: str = "RuntimeError: shapes differ") -> str:
    return f"epoch 0\n{failure.TRACEBACK}\n{''.join(frames)}{error}\n"


OF_THE_SCRIPT = {
    "no traceback": "exit code -11",
    "its own line": traceback(SCRIPT),
    "below the probe, which passes its call on": traceback(SCRIPT, WRAPPED, PASSING, TORCH, SCRIPT),
    "in torch, called through the probe": traceback(SCRIPT, WRAPPED, PASSING, TORCH),
    "in torch, called as a module": traceback(SCRIPT, OF_MODULES, PASSING, TORCH),
    "in C, called as a module": traceback(SCRIPT, OF_MODULES, PASSING),
    "in C, called through the probe": traceback(SCRIPT, WRAPPED, PASSING),
    "a wrong call of what the probe stands in front of": traceback(
        SCRIPT, WRAPPED, error="TypeError: one argument"
    ),
    "words of torch that the script raises itself": traceback(
        RAISE, error="RuntimeError: No CUDA GPUs are available"
    ),
    "after a fault of the probe that it has caught, and left": traceback(PROBE) + traceback(SCRIPT),
    "its own assertion": traceback(ASSERTION.format("len(batch) == 4"), error="AssertionError"),
}
OF_THE_CHECK = {
    "in the probe": traceback(SCRIPT, WRAPPED, PROBE),
    "in torch, called by the probe": traceback(SCRIPT, WRAPPED, PROBE, TORCH),
    "raised by the simulation": traceback(SCRIPT, SIMULATED),
    "raised by the simulation in a call of torch": traceback(SCRIPT, TORCH, SIMULATED),
    "in torch.cuda itself": traceback(
        SCRIPT, CUDA, error="AttributeError: module 'torch._C' has no attribute 'x'"
    ),
    "by torch, which finds no GPU": traceback(
        SCRIPT, error="RuntimeError: Found no NVIDIA driver on your system."
    ),
    "its assertion that a tensor is on a GPU": traceback(
        ASSERTION.format("weight.is_cuda"), error="AssertionError"
    ),
    "its assertion that a tensor is on its device": traceback(
        ASSERTION.format("weight.device == device"), error="AssertionError"
    ),
    "in an optimizer that needs a GPU for its graph": traceback(
        SCRIPT, TORCH, error="AssertionError: If capturable=True, params must be on cuda."
    ),
    "the cause of what the script raises then": (
        f"{traceback(PROBE)}\nThe above exception was the direct cause of the following exception:\n\n"
        + traceback(SCRIPT)
    ),
    "in a process that the script has made": traceback(
        SCRIPT, error="ProcessRaisedException:\n\n-- Process 1:"
    )
    + traceback(SCRIPT, PROBE),
}


@pytest.mark.parametrize("output", OF_THE_SCRIPT.values(), ids=OF_THE_SCRIPT)
def test_a_fault_of_the_script_is_said_to_be_its_own(output: str) -> None:
    assert classify_failure(output, FOLDERS).cause == "script"


@pytest.mark.parametrize("output", OF_THE_CHECK.values(), ids=OF_THE_CHECK)
@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_fault_of_the_probe_or_of_simulated_cuda_accuses_nobody(output: str, prefix: str) -> None:
    output = "".join(prefix + line for line in output.splitlines(keepends=True))
    reason = classify_failure(output, FOLDERS)
    assert reason.cause == "check"
    assert reason.line.startswith("this check cannot run it: ")
    assert "Error: " in reason.line


def test_what_is_not_simulated_is_named_without_our_modules() -> None:
    error = "stepladder.tools.check.simulated_gpu.refusal.NotSimulated: torch.cuda.graph is not simulated"
    reason = classify_failure(traceback(SCRIPT, SIMULATED, error=error), FOLDERS)
    assert (
        reason.line == "this check cannot run it: NotSimulated: torch.cuda.graph is not simulated"
    )


def test_an_assertion_without_a_message_is_shown_as_it_is_written() -> None:
    output = traceback(ASSERTION.format("weight.is_cuda"), error="AssertionError")
    reason = classify_failure(output, FOLDERS)
    assert reason.line == "this check cannot run it: AssertionError: assert weight.is_cuda"


def test_the_users_frames_are_shown_without_the_probes_and_in_the_users_folder() -> None:
    shown = classify_failure(traceback(SCRIPT, WRAPPED, PASSING, TORCH), FOLDERS).output
    assert shown == traceback(SCRIPT, TORCH).replace("/t/copy", "/home/u/work").rstrip()


def test_what_a_rank_has_printed_is_shown_without_what_differs_each_time() -> None:
    log = "[rank1]:[W1126 08:51:02.12345 ProcessGroupGloo.cpp:1] Warning: it is late"
    frames = "frame #0: c10::Error::Error(std::string) + 0x98 (0x7f12 in libc10.so)\n"
    shown = classify_failure(f"{log}\n{frames}{traceback(SCRIPT)}", FOLDERS).output
    assert "[W ProcessGroupGloo.cpp:1] Warning: it is late\nepoch 0\n" in shown
    assert "frame #0" not in shown


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        ("ValueError: no such label", True),
        (
            "RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer",
            False,
        ),
        ("RuntimeError: Timed out waiting 12000ms for recv operation to complete", False),
        ("torch.distributed.DistStoreError: Timed out after 5 seconds", False),
    ],
)
def test_what_a_rank_raises_tells_of_itself_or_of_another_rank(error: str, is_own: bool) -> None:
    frame = '  File "/t/copy/train.py", line 3, in main\n    dist.init_process_group("gloo")\n'
    assert failure.has_own_error(traceback(frame, error=error)) is is_own
    assert not failure.has_own_error("terminate called without an active exception")


NOT_OF_THE_SCRIPT = {
    "a package that is not installed": (
        "ModuleNotFoundError: No module named 'apex.parallel'",
        "cannot run here, as above: apex is not installed",
    ),
    "a port that another program listens on": (
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local"
        " network address. port: 12355, useIpv6: false, code: -98, name: EADDRINUSE, message: x",
        "cannot run here, as above: port 12355 is in use, by another program or by another",
    ),
    "a variable that its cluster sets": (
        '  File "<frozen os>", line 679, in __getitem__\n'
        "    raise KeyError(key) from None\nKeyError: 'SLURM_CPUS_PER_TASK'",
        "cannot run here, as above: the variable SLURM_CPUS_PER_TASK is not set",
    ),
    "no network": (
        "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>",
        "cannot run here, as above: it needs a network",
    ),
}


@pytest.mark.parametrize(("error", "line"), NOT_OF_THE_SCRIPT.values(), ids=NOT_OF_THE_SCRIPT)
def test_what_the_machine_lacks_is_not_said_to_be_the_scripts_failure(
    error: str, line: str
) -> None:
    assert line in classify_failure(traceback(SCRIPT, error=error), FOLDERS).line


def test_an_operator_that_only_cuda_divides_is_not_simulated() -> None:
    error = (
        "NotImplementedError: Operator aten.x.default does not have a sharding strategy registered."
    )
    reason = classify_failure(traceback(SCRIPT, TORCH, error=error), FOLDERS)
    assert reason.cause == "check"
