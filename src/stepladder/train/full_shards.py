"""`--shard full`: each rank holds its rows of the weights, of their gradients and of the
optimizer's state.

Stage 3 of ZeRO (Rajbhandari et al., SC 2020), by torch's own fully_shard (FSDP2): a block's weights
are gathered before its forward and before its backward, and let go after it; its gradient is added
over ranks in slices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stepladder.storage.snapshot_slices import (
    AVERAGE_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    STATE_PREFIX,
    SliceReader,
    TensorSlice,
    get_local_slice,
)
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.model_blocks import OUTSIDE_BLOCKS, find_blocks
from stepladder.train.phases import EXCHANGING
from stepladder.train.weight_average import WeightAverage

# As fully_shard calls them; before torch 2.13 they had other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
MESHES = (
    count()
)  # torch keeps what it finds of a mesh, with that mesh, also for one that is equal: by name too


class FullShards:
    """A job whose weights and optimizer's state are spread over the ranks by rows. Its parameters
    are DTensors.

    The optimizer is the job's own, with its groups and its schedule. It must have no state yet.
    taken: what `take` reads of a snapshot.  about: for its manifest.
    """

    snapshot_prefix = STATE_PREFIX

    def __init__(self, job: Job, comm: Comm) -> None:
        self.model, self.optimizer, self.comm = job.model, job.optimizer, comm
        self.average: WeightAverage | None = None
        names = {param: name for name, param in job.model.named_parameters()}
        self.numbers = [
            names[param] for group in job.optimizer.param_groups for param in group["params"]
        ]
        all_names = job.model.named_parameters(remove_duplicate=False)
        self.manifest_entry = {
            "aliases": {name: names[param] for name, param in all_names if names[param] != name}
        }
        name = f"rows-{next(MESHES)}"
        mesh = init_device_mesh(comm.device.type, (comm.world.world_size,), mesh_dim_names=(name,))
        for block in [*find_blocks(job), job.model]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        for path, module in job.model.named_modules():
            if isinstance(
                module, FSDPModule
            ):  # sums, not means: they are divided by what the loss counts
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if comm.device.type == "cpu":
                    name_of_block = path or OUTSIDE_BLOCKS
                    module.set_custom_all_gather(BlockAllGather(comm, name_of_block))  # type: ignore[arg-type]
                    module.set_custom_reduce_scatter(BlockReduceScatter(comm, name_of_block))  # type: ignore[arg-type]
        if comm.device.type != "cpu":
            job.model.to(comm.device)  # buffers
        self.params: dict[str, Any] = dict(job.model.named_parameters())
        for group in job.optimizer.param_groups:
            group["params"] = [self.params[names[param]] for param in group["params"]]

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """The optimizer's own step: it has DTensors."""
        yield self.optimizer.step

    def clip(self, most: float) -> torch.Tensor:
        """Scale the gradient to this norm at most. Returns the norm before, of all ranks' rows, of
        shape ().
        """
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        with self.comm.phases(EXCHANGING):
            whole: torch.Tensor = norm.full_tensor()
        return whole.detach()

    def gather(self) -> None:
        """Nothing: weights are gathered where they are used."""

    def adopt_state(self) -> None:
        """Keep this rank's rows of the state that the optimizer has for whole parameters."""
        for name in self.numbers:
            param = self.params[name]
            for key, value in self.optimizer.state.get(param, {}).items():
                if (
                    isinstance(value, torch.Tensor)
                    and value.shape == param.shape
                    and not is_distributed(value)
                ):
                    mine = get_local_slice(param)
                    rows = value[mine.first : mine.first + len(mine.values)]
                    self.optimizer.state[param][key] = distribute_like(param, rows)

    def load_slices(self, reader: SliceReader) -> None:
        """This rank's rows of the state that a snapshot has in slices."""
        for name in reader.names(self.snapshot_prefix):
            if not reader.shape(
                STATE_PREFIX + name
            ):  # a count of steps, which the optimizer has loaded
                continue
            if name.startswith(AVERAGE_PREFIX):
                self._take_average(reader, name)
                continue
            *_, number, key = name.split("/")
            param = self.params[self.numbers[int(number)]]
            mine = get_local_slice(param)
            rows = reader.read_rows(STATE_PREFIX + name, mine.first, mine.first + len(mine.values))
            self.optimizer.state[param][key] = distribute_like(param, rows)

    def _take_average(self, reader: SliceReader, name: str) -> None:
        if self.average is not None:
            mine = self.average.rows()[name.removeprefix(AVERAGE_PREFIX)]
            mine.values.copy_(
                reader.read_rows(STATE_PREFIX + name, mine.first, mine.first + len(mine.values))
            )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, without what `slices` has."""
        whole: dict[int, dict[str, Any]] = defaultdict(dict)
        for number, state in self._states():
            whole[number] = {
                key: value for key, value in state.items() if not is_distributed(value)
            }
        return {**self.optimizer.state_dict(), "state": dict(whole)}

    def slices(self) -> dict[str, TensorSlice]:
        """This rank's rows of weights and state, by the names that they have in a snapshot."""
        found = {MODEL_PREFIX + name: get_local_slice(param) for name, param in self.params.items()}
        for number, state in self._states():
            for key, value in state.items():
                if is_distributed(value):
                    found[f"{STATE_PREFIX}{OPTIMIZER_PREFIX}{number}/{key}"] = get_local_slice(
                        value
                    )
        if self.average is not None:
            found |= {
                STATE_PREFIX + AVERAGE_PREFIX + name: rows
                for name, rows in self.average.rows().items()
            }
        return found

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, name in enumerate(self.numbers):
            if self.params[name] in self.optimizer.state:
                yield number, self.optimizer.state[self.params[name]]


class BlockAllGather:
    """fully_shard's all-gather on CPUs, by way of shared memory where there is some. gloo's takes a
    second tensor as large as the result, and lets go of it late: with 4 ranks up to ten of them lay
    there at the same time."""

    def __init__(self, comm: Comm, block: str) -> None:
        self.comm, self.block = comm, block

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
    ) -> Any:
        if self.comm.shared_memory is not None:
            return self.comm.all_gather(output_tensor, input_tensor, self.block).wait()
        self.comm.progress.record_block_collective("all_gather", self.block, input_tensor.numel())
        with self.comm.phases(EXCHANGING):
            return all_gather(output_tensor, input_tensor, group=group, **how)


class BlockReduceScatter(BlockAllGather):
    """fully_shard's reduce-scatter: gloo's adds up all of a copy, on each rank."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **how: Any
    ) -> Any:
        if self.comm.shared_memory is not None:
            return self.comm.reduce_scatter(output_tensor, input_tensor, self.block).wait()
        self.comm.progress.record_block_collective(
            "reduce_scatter", self.block, input_tensor.numel()
        )
        with self.comm.phases(EXCHANGING):
            return reduce_scatter(output_tensor, input_tensor, group=group, **how)


def is_distributed(value: Any) -> bool:
    return isinstance(value, DTensor)


def distribute_like(param: DTensor, rows: torch.Tensor) -> DTensor:
    """A DTensor that lies as `param` does, of this rank's rows."""
    local = rows.to(param.device).contiguous().clone()
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
