"""`train --dry-run`: print the settings of a run and its memory. It trains and writes nothing."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table

from stepladder.core.console import echo_json, write_text
from stepladder.core.errors import DONE, InputError, to_one_line
from stepladder.core.numbers import format_count
from stepladder.core.settings import LAYOUTS, TrainRequest
from stepladder.core.terminal import make_console
from stepladder.core.world import World
from stepladder.launcher.topology import Topology
from stepladder.train.fake_tensors import FakeModelBuilder
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job
from stepladder.train.job_runner import load_job
from stepladder.train.memory_estimate import FakeComm, MemoryEstimate, estimate_memory
from stepladder.train.run_description import describe_run
from stepladder.train.run_spec import RunSpec
from stepladder_exchange.shared_segment import can_share_memory

SHARD_VALUES = list(dict.fromkeys(shard for shard, _ in LAYOUTS))
USUAL_SIZES = (1, 2, 4, 8)
MAX_ESTIMATED_PROCESSES = 1024
SMALLER_JOB_HINT = "a smaller --microbatch, or a smaller model"


@dataclass(frozen=True)
class Estimate:
    """The memory that each of `nproc` processes needs with a value of --shard."""

    nproc: int
    shard: str
    memory: MemoryEstimate

    def fits_in(self, device_memory: int) -> bool:
        return self.memory.peak <= device_memory

    def as_json(self, device_memory: int | None) -> dict[str, Any]:
        fits = None if device_memory is None else self.fits_in(device_memory)
        return {"nproc": self.nproc, "shard": self.shard, **asdict(self.memory), "fits": fits}


class _DryRun:
    """A job of fake tensors, which take no memory, and the memory that it would need.

    Raises InputError as `train` does.
    """

    def __init__(self, request: TrainRequest, topology: Topology) -> None:
        nodes, nproc = topology.parse_ranges()
        self.request = request
        self.num_nodes = nodes[1]
        self.ranks_per_node = nproc[1]
        # The number of processes that the user asks for.
        self.requested_size = self.num_nodes * self.ranks_per_node
        request.settings.validate_shard_copies(self.requested_size)
        world = self._make_world(self.requested_size)
        self.build, self.recipe = load_job(request, world)
        self.fake_builder = FakeModelBuilder()
        self.job: Job = self.fake_builder.build(self.build)
        self.device = pick_device(request.settings.device, World())
        self.spec = self._make_spec(self.requested_size, request.settings.shard)

    def _make_world(self, size: int) -> World:
        """Return the world of the last rank: no rank has more of a batch."""
        local_size = min(size, self.ranks_per_node) if self.num_nodes > 1 else size
        return World(size - 1, size, (size - 1) % local_size, local_size)

    def _make_spec(self, size: int, shard: Any) -> RunSpec:
        requested = self.request.settings
        shard_copies = requested.shard_copies if shard == requested.shard else 1
        settings = replace(requested, shard=shard, shard_copies=shard_copies)
        job = self.job
        if shard == "full" and size > 1:
            # fully_shard changes the model for good, and for one number of processes.
            job = self.fake_builder.build(self.build)
        return RunSpec.make(job, settings, self.recipe, self._make_comm(size))

    def _make_comm(self, size: int) -> FakeComm:
        is_on_one_node = self.num_nodes == 1 and self.device.type == "cpu"
        shares_memory = is_on_one_node and can_share_memory(size)
        return FakeComm(self._make_world(size), shares_memory)

    @property
    def max_size(self) -> int:
        return min(self.spec.plan.num_microbatches, MAX_ESTIMATED_PROCESSES)

    def choose_sizes(self) -> list[int]:
        """Return the numbers of processes to estimate the memory for."""
        if self.request.settings.batch_per_rank is not None:
            # The global batch depends on the number of processes: another number is another run.
            return [self.requested_size]
        sizes = {*USUAL_SIZES, self.requested_size}
        return sorted(size for size in sizes if size <= self.max_size)

    def estimate_size(self, size: int) -> list[Estimate]:
        """Return an estimate for each value of --shard that the job allows.

        The value "full" does not allow a loss that reads weights outside of a forward.
        """
        estimates = []
        for shard in SHARD_VALUES if size > 1 else SHARD_VALUES[:1]:
            gc.collect()  # the last estimate's views of the weights are in reference cycles
            try:
                spec = self._make_spec(size, shard)
                memory = estimate_memory(self.fake_builder, spec, self._make_comm(size))
            except Exception:  # the job's own code may raise anything
                if shard in ("none", self.request.settings.shard):
                    raise
                continue
            estimates.append(Estimate(size, shard, memory))
        return estimates

    def estimate_sizes(self, device_memory: int | None) -> list[Estimate]:
        """Return the estimates of `choose_sizes`, and of larger sizes until one fits."""
        sizes = self.choose_sizes()
        estimates = [estimate for size in sizes for estimate in self.estimate_size(size)]
        if device_memory is None or len(sizes) == 1:
            return estimates
        size = sizes[-1]
        while 2 * size <= self.max_size:
            if any(estimate.fits_in(device_memory) for estimate in estimates):
                break
            size *= 2
            estimates += self.estimate_size(size)
        return estimates

    def describe(self) -> list[str]:
        """Return the run's effective values and its definition as lines."""
        definition = replace(self.spec, device=self.device).definition
        lines = [f"    {name} {value}" for name, value in sorted(definition.items())]
        world = self._make_world(self.requested_size)
        return [*describe_run(self.spec, world), "  definition:", *lines]

    def as_json(self) -> dict[str, Any]:
        """Return the run's effective values and its definition as config.json has them."""
        rates = sorted({group["lr"] for group in self.job.optimizer.param_groups})
        config = replace(self.spec, device=self.device).as_json()
        return {**config, "steps": self.spec.num_steps, "learning_rates": rates}


def dry_run(request: TrainRequest, topology: Topology, device_memory: int | None) -> int:
    """Print the run and its memory. Returns the exit code.

    The device memory is in bytes; without it, that of the GPU counts, if there is one.
    """
    run = _DryRun(request, topology)
    if device_memory is None and run.device.type == "cuda":
        device_memory = torch.cuda.get_device_properties(run.device).total_memory
    # An estimate makes steps, which change the learning rates of a schedule: describe first.
    description = run.describe()
    config = run.as_json()
    estimates: list[Estimate] = []
    try:
        estimates = run.estimate_sizes(device_memory)
        advice = advise(estimates, run.requested_size, request.settings.shard, device_memory)
    except InputError:
        raise
    except Exception as error:  # the job's own code may fail on tensors without values
        reason = f"{type(error).__name__}: {to_one_line(str(error))}"
        advice = f"the memory cannot be computed: {reason}"
    if request.as_json:
        memory = {
            "memory": [estimate.as_json(device_memory) for estimate in estimates],
            "device_memory": device_memory,
        }
        echo_json({**config, **memory, "advice": advice})
        return DONE
    write_text("\n".join(description), sys.stdout)
    if estimates:
        make_console(file=sys.stdout).print(_make_table(estimates, device_memory))
    write_text(advice, sys.stdout)
    return DONE


def _make_table(estimates: Iterable[Estimate], device_memory: int | None) -> Table:
    table = Table(title="memory of a process, MB", title_justify="left", box=None, pad_edge=False)
    columns = ["processes", "--shard", "weights", "optimizer", "data", "rest", "peak"]
    if device_memory is not None:
        columns.append("fits")
    for column in columns:
        table.add_column(column, justify="left" if column == "--shard" else "right")
    for estimate in estimates:
        memory = estimate.memory
        amounts = (memory.weights, memory.optimizer, memory.data, memory.transient, memory.peak)
        megabytes = [f"{amount / 1e6:,.1f}" for amount in amounts]
        cells = [str(estimate.nproc), estimate.shard, *megabytes]
        if device_memory is not None:
            cells.append("yes" if estimate.fits_in(device_memory) else "no")
        table.add_row(*cells)
    return table


def advise(
    estimates: list[Estimate], requested_size: int, shard: str, device_memory: int | None
) -> str:
    """Return a sentence: whether the run fits, and with which flags it would."""
    if device_memory is None:
        return "--device-memory SIZE says what fits"
    memory = f"{device_memory / 1e9:.3g} GB"
    processes = format_count(requested_size, "process")
    requested_shard = shard if requested_size > 1 else "none"
    for estimate in estimates:
        is_requested = (estimate.nproc, estimate.shard) == (requested_size, requested_shard)
        if is_requested and estimate.fits_in(device_memory):
            return f"fits in {memory} on {processes}"
    alternatives = [
        alternative
        for name in SHARD_VALUES
        if (alternative := _find_fitting_sizes(estimates, name, device_memory)) is not None
    ]
    if alternatives:
        flags = ", or ".join(alternatives)
        return f"does not fit in {memory} on {processes}: needs {flags}"
    largest = format_count(max(estimate.nproc for estimate in estimates), "process")
    return (
        f"does not fit in {memory}, on up to {largest} and with any --shard."
        f" HINT: {SMALLER_JOB_HINT}"
    )


def _find_fitting_sizes(estimates: list[Estimate], shard: str, device_memory: int) -> str | None:
    """Return the numbers of processes that fit with a value of --shard, None if there are none."""
    fits_of_size = {
        estimate.nproc: estimate.fits_in(device_memory)
        for estimate in estimates
        if estimate.shard == shard
    }
    fitting = [size for size, fits in fits_of_size.items() if fits]
    if not fitting:
        return None
    smallest = min(fitting)
    larger = [fits for size, fits in fits_of_size.items() if size > smallest]
    if larger and all(larger):
        return f"--shard {shard} on {smallest} or more processes"
    return f"--shard {shard} on {format_count(smallest, 'process')}"
