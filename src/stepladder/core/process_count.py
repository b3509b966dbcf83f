"""How many processes and threads fit this machine, determined without torch."""

from __future__ import annotations

import os
import subprocess

from stepladder.core.errors import InputError
from stepladder.core.numbers import parse_whole_number

# More could only wait for each other, and a mistyped number would fill the machine.
MAX_PROCESSES_PER_CORE = 16
MIN_PROCESS_LIMIT = 64  # so many may be tried on any machine
MAX_PROCESSES = 10**6
NVIDIA_SMI_TIMEOUT_S = 20


def parse_process_range(text: str) -> tuple[int, int]:
    """Parse --nproc: A:B, or what `parse_process_count` accepts.

    Returns:
        The fewest and the most processes.

    Raises:
        InputError: The text is neither, or more than this machine should start.
    """
    if ":" in text:
        minimum, maximum = parse_range("--nproc", text)
    else:
        minimum = maximum = parse_process_count(text)
    validate_process_count(maximum)
    return minimum, maximum


def validate_process_count(nproc: int) -> None:
    """Raise InputError for more processes than this machine should start."""
    num_cores = count_cores()
    if nproc > max(MIN_PROCESS_LIMIT, MAX_PROCESSES_PER_CORE * num_cores):
        raise InputError(
            f"--nproc {nproc} on a machine with {num_cores} cores", f"--nproc {num_cores}, or auto"
        )


def parse_range(flag: str, text: str) -> tuple[int, int]:
    """Parse N, or A:B with 1 <= A <= B.

    Returns:
        The smallest and the largest number; both are N if the text is N.

    Raises:
        InputError: The text is neither a number nor a range.
    """
    minimum_text, colon, maximum_text = text.partition(":")
    minimum = parse_whole_number(minimum_text, 1, MAX_PROCESSES)
    maximum = parse_whole_number(maximum_text, 1, MAX_PROCESSES) if colon else minimum
    if minimum is None or maximum is None or minimum > maximum:
        raise InputError(
            f"{flag} {text!r} is not a number or a range",
            f"{flag} 2, or {flag} 1:4 for 4 and at least 1",
        )
    return minimum, maximum


def parse_process_count(text: str) -> int:
    """Parse a number of processes, or one of torchrun's words: gpu, cpu or auto.

    Returns:
        The number; for "gpu" the number of GPUs, for "cpu" of cores, for "auto" of GPUs, or of
        cores if there is no GPU.

    Raises:
        InputError: The text is neither a number nor such a word, or is gpu on a machine without a
            GPU.
    """
    number = parse_whole_number(text, 1, MAX_PROCESSES)
    if number:
        return number
    if text not in ("gpu", "cpu", "auto"):
        raise InputError(
            f"--nproc {text!r} is not a number of processes", "--nproc 2, or auto, gpu, cpu"
        )
    count = count_cores() if text == "cpu" else count_gpus()
    if text == "auto" and count == 0:
        count = count_cores()
    if count == 0:
        raise InputError(f"--nproc {text}, but no GPU is visible", "--nproc cpu, or a number")
    return count


def count_cores() -> int:
    """Return the number of cores that this process may use, not of all that exist."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_threads_per_rank(threads: int | None, sync: str, ranks_per_node: int) -> int:
    """Return the threads of one rank: an equal part of the cores, or 1 in exact mode.

    In exact mode the number of threads decides the order of additions, and so the result.

    Args:
        threads: As --threads has it.
        sync: As --sync has it.
        ranks_per_node: How many ranks share the cores.
    """
    if threads:
        return threads
    if sync == "exact":
        return 1
    return max(1, count_cores() // ranks_per_node)


def count_gpus() -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES names, or that nvidia-smi lists."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None:
        devices = [device.strip() for device in visible_devices.split(",")]
        return sum(device not in ("", "-1") for device in devices)
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(listing.stdout.splitlines())
