"""How many processes and threads fit this machine, found without torch."""

from __future__ import annotations

import os
import subprocess

from stepladder.core.errors import InputError
from stepladder.core.numbers import whole
from stepladder.core.settings import Settings

MOST_PER_CORE = (
    16  # more could only wait for each other; a number typed wrong would fill the machine
)
FEW = 64  # may always be tried
MOST_PROCESSES = 10**6


def process_range(text: str) -> tuple[int, int]:
    """--nproc as the least and the most: A:B, or a count as `count_processes` has it. Raises
    InputError.
    """
    least, most = read_range("--nproc", text) if ":" in text else (count_processes(text),) * 2
    refuse_too_many(most)
    return least, most


def refuse_too_many(nproc: int) -> None:
    """Raises InputError for more processes than this machine should be asked to start."""
    if nproc > max(FEW, MOST_PER_CORE * count_cores()):
        raise InputError(
            f"--nproc {nproc} on a machine with {count_cores()} cores",
            f"--nproc {count_cores()}, or auto",
        )


def read_range(flag: str, text: str) -> tuple[int, int]:
    """N, or A:B with 1 <= A <= B. Raises InputError."""
    least, colon, most = text.partition(":")
    first, last = (
        whole(least, 1, MOST_PROCESSES),
        whole(most if colon else least, 1, MOST_PROCESSES),
    )
    if first is None or last is None or first > last:
        raise InputError(
            f"{flag} {text!r} is not a number or a range",
            f"{flag} 2, or {flag} 1:4 for 4 and at least 1",
        )
    return first, last


def count_processes(text: str) -> int:
    """A number, or as torchrun has it: gpu, cpu, or auto (gpu where there is one). Raises
    InputError.
    """
    if number := whole(text, 1, MOST_PROCESSES):
        return number
    if text not in ("gpu", "cpu", "auto"):
        raise InputError(
            f"--nproc {text!r} is not a number of processes", "--nproc 2, or auto, gpu, cpu"
        )
    found = count_cores() if text == "cpu" else count_gpus()
    if text == "auto":
        found = found or count_cores()
    if found == 0:
        raise InputError(f"--nproc {text}, but no GPU is visible", "--nproc cpu, or a number")
    return found


def count_cores() -> int:
    """Cores that this process may use, not all that exist."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(settings: Settings, ranks_per_node: int) -> int:
    """Cores shared out among a node's ranks; 1 in exact mode, where threads define the result."""
    return settings.threads or (
        1 if settings.sync == "exact" else max(1, count_cores() // ranks_per_node)
    )


def count_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listed.stdout.splitlines())
