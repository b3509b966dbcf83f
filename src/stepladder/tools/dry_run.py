"""`train --dry-run`: what a run would be, and what it needs of memory. Trains and writes nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table

from stepladder.core.console import write_text
from stepladder.core.errors import DONE, InputError, to_one_line
from stepladder.core.settings import TrainRequest
from stepladder.core.terminal import make_console
from stepladder.core.world import World
from stepladder.launcher.topology import Topology
from stepladder.rank.shared_segment import can_share_memory
from stepladder.train.fake_tensors import FakeModelBuilder
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job
from stepladder.train.job_runner import load_job
from stepladder.train.memory_estimate import FakeComm, MemoryEstimate, estimate_memory
from stepladder.train.run_spec import RunSpec, describe_run

SCHEMA = 1
SHARDS = ("none", "optimizer", "full")  # the values of --shard
SIZES = (1, 2, 4, 8)
MOST_PROCESSES = 1024
HINT = "a smaller --microbatch, or a smaller model"


@dataclass(frozen=True)
class Estimate:
    """What each of `nproc` processes needs with `shard`."""

    nproc: int
    shard: str
    memory: MemoryEstimate

    def as_json(self, device_memory: int | None) -> dict[str, Any]:
        fits = None if device_memory is None else self.memory.peak <= device_memory
        return {"nproc": self.nproc, "shard": self.shard, **asdict(self.memory), "fits": fits}


class DryRun:
    """A job whose weights take no memory, and what it would need on so many processes.

    Raises InputError as `train` does.
    """

    def __init__(self, request: TrainRequest, topology: Topology) -> None:
        nodes, nproc = topology.parse_ranges()
        self.request, self.nodes, self.per_node = request, nodes[1], nproc[1]
        self.asked = self.nodes * self.per_node
        request.settings.validate_shard_copies(self.asked)
        world = self._world(self.asked)
        self.build, self.recipe = load_job(request, world)
        self.weightless = FakeModelBuilder()
        self.job: Job = self.weightless.build(self.build)
        self.device = pick_device(request.settings.device, World())
        self.spec = self._spec(self.asked, request.settings.shard)

    def _world(self, size: int) -> World:
        """The last rank's: none has more of a batch."""
        here = min(size, self.per_node) if self.nodes > 1 else size
        return World(size - 1, size, (size - 1) % here, here)

    def _spec(self, size: int, shard: Any) -> RunSpec:
        asked = self.request.settings
        settings = replace(
            asked, shard=shard, shard_copies=asked.shard_copies if shard == asked.shard else 1
        )
        # fully_shard changes the model for good, and for one number of processes
        job = self.weightless.build(self.build) if shard == "full" and size > 1 else self.job
        return RunSpec.make(job, settings, self.recipe, self._comm(size))

    def _comm(self, size: int) -> FakeComm:
        shares = self.nodes == 1 and self.device.type == "cpu" and can_share_memory(size)
        return FakeComm(self._world(size), shares)

    def sizes(self) -> list[int]:
        """Numbers of processes to look at."""
        if self.request.settings.batch_per_rank is not None:  # on another number it is another run
            return [self.asked]
        most = min(self.spec.plan.num_microbatches, MOST_PROCESSES)
        return sorted({size for size in (*SIZES, self.asked) if size <= most})

    def estimates(self, size: int) -> list[Estimate]:
        """One for each --shard that the job allows: with full, no loss may read weights past
        forward.
        """
        found = []
        for shard in SHARDS if size > 1 else SHARDS[:1]:
            try:
                memory = estimate_memory(self.weightless, self._spec(size, shard), self._comm(size))
            except Exception:  # the job's own code may raise anything
                if shard in ("none", self.request.settings.shard):
                    raise
                continue
            found.append(Estimate(size, shard, memory))
        return found

    def text(self) -> list[str]:
        """The run's effective values and its definition, for a person."""
        definition = replace(self.spec, device=self.device).definition
        lines = [f"    {name} {value}" for name, value in sorted(definition.items())]
        return [*describe_run(self.spec, self._world(self.asked)), "  definition:", *lines]

    def as_json(self) -> dict[str, Any]:
        """The same for a program, as config.json has it."""
        rates = sorted({group["lr"] for group in self.job.optimizer.param_groups})
        about = replace(self.spec, device=self.device).as_json()
        return {"schema": SCHEMA, **about, "steps": self.spec.num_steps, "learning_rates": rates}

    def all_estimates(self, device_memory: int | None) -> list[Estimate]:
        """Of `sizes`, and of larger ones while none fits in `device_memory` bytes."""
        sizes = self.sizes()
        found = [one for size in sizes for one in self.estimates(size)]
        most = min(self.spec.plan.num_microbatches, MOST_PROCESSES)
        while device_memory is not None and len(sizes) > 1 and 2 * sizes[-1] <= most:
            if any(one.memory.peak <= device_memory for one in found):
                break
            sizes.append(2 * sizes[-1])
            found += self.estimates(sizes[-1])
        return found


def dry_run(request: TrainRequest, topology: Topology, device_memory: int | None) -> int:
    """Print it. device_memory: bytes; by default those of the GPU, where there is one. Returns the
    exit code.
    """
    run = DryRun(request, topology)
    if device_memory is None and run.device.type == "cuda":
        device_memory = torch.cuda.get_device_properties(run.device).total_memory
    text, about = run.text(), run.as_json()  # before any step moves a schedule
    found, needs = [], ""
    try:
        found = run.all_estimates(device_memory)
        needs = advise(found, run.asked, request.settings.shard, device_memory)
    except InputError:
        raise
    except Exception as error:  # whatever the job's own code makes of tensors that hold nothing
        needs = f"the memory cannot be computed: {type(error).__name__}: {to_one_line(str(error))}"
    if request.as_json:
        memory = {
            "memory": [one.as_json(device_memory) for one in found],
            "device_memory": device_memory,
        }
        write_text(json.dumps({**about, **memory, "advice": needs}), sys.stdout)
        return DONE
    write_text("\n".join(text), sys.stdout)
    if found:
        make_console(file=sys.stdout).print(table_of(found, device_memory))
    write_text(needs, sys.stdout)
    return DONE


def table_of(found: Iterable[Estimate], device_memory: int | None) -> Table:
    table = Table(title="memory of a process, MB", title_justify="left", box=None, pad_edge=False)
    names = ["processes", "--shard", "weights", "optimizer", "data", "rest", "peak"]
    for name in names if device_memory is None else [*names, "fits"]:
        table.add_column(name, justify="left" if name == "--shard" else "right")
    for one in found:
        memory = one.memory
        amounts = (memory.weights, memory.optimizer, memory.data, memory.transient, memory.peak)
        cells = [str(one.nproc), one.shard, *(f"{amount / 1e6:,.1f}" for amount in amounts)]
        if device_memory is not None:
            cells.append("yes" if memory.peak <= device_memory else "no")
        table.add_row(*cells)
    return table


def advise(found: list[Estimate], asked: int, shard: str, device_memory: int | None) -> str:
    """What to type so that it fits, in a sentence."""
    if device_memory is None:
        return "--device-memory SIZE says what fits"
    size, processes = f"{device_memory / 1e9:.3g} GB", count_of(asked)
    fits = {(one.nproc, one.shard): one.memory.peak <= device_memory for one in found}
    if fits.get((asked, shard if asked > 1 else "none")):
        return f"fits in {size} on {processes}"
    ways = []
    for name in SHARDS:
        sizes = {nproc: fit for (nproc, other), fit in fits.items() if other == name}
        least = min((nproc for nproc, fit in sizes.items() if fit), default=0)
        if least:
            more = all(fit for nproc, fit in sizes.items() if nproc > least) and least < max(sizes)
            ways.append(
                f"--shard {name} on {f'{least} or more processes' if more else count_of(least)}"
            )
    if not ways:
        most = count_of(max(one.nproc for one in found))
        return f"does not fit in {size}, on up to {most} and with any --shard. HINT: {HINT}"
    return f"does not fit in {size} on {processes}: needs {', or '.join(ways)}"


def count_of(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
