"""`--shard full`: each rank holds its rows of the weights, the gradients and the optimizer's state.

Stage 3 of ZeRO (Rajbhandari et al., SC 2020), by torch's own fully_shard (FSDP2): a block's weights
are gathered before its forward and before its backward, and freed after it; its gradient is added
over ranks in slices.
"""

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

# torch caches what it knows of a mesh also for an equal mesh, so each mesh gets its own name.
MESH_NUMBERS = count()


class FullShards:
    """A job whose weights and optimizer state are spread over the ranks by rows, as DTensors.

    The optimizer is the job's own, with its groups and its schedule. It must have no state yet.

    Attributes:
        snapshot_prefix: The names that `load_slices` reads from a snapshot begin with it.
        manifest_entry: Added to the manifest of a snapshot.
    """

    snapshot_prefix = STATE_PREFIX

    def __init__(self, job: Job, comm: Comm) -> None:
        self.model = job.model
        self.optimizer = job.optimizer
        self.comm = comm
        self.average: WeightAverage | None = None
        names = {param: name for name, param in job.model.named_parameters()}
        self.names_by_number = [
            names[param] for group in job.optimizer.param_groups for param in group["params"]
        ]
        all_names = job.model.named_parameters(remove_duplicate=False)
        aliases = {name: names[param] for name, param in all_names if names[param] != name}
        self.manifest_entry = {"aliases": aliases}
        mesh_name = f"rows-{next(MESH_NUMBERS)}"
        mesh = init_device_mesh(
            comm.device.type, (comm.world.world_size,), mesh_dim_names=(mesh_name,)
        )
        for block in [*find_blocks(job), job.model]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        self._configure_modules()
        if comm.device.type != "cpu":
            job.model.to(comm.device)  # buffers
        self.params: dict[str, Any] = dict(job.model.named_parameters())
        for group in job.optimizer.param_groups:
            group["params"] = [self.params[names[param]] for param in group["params"]]

    def _configure_modules(self) -> None:
        """Have fully_shard compute sums, and on a CPU use the collectives of `comm`."""
        for path, module in self.model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            module.set_gradient_divide_factor(1.0)  # sums are divided by what the loss counts
            module.set_force_sum_reduction_for_comms(True)
            if self.comm.device.type == "cpu":
                block = path or OUTSIDE_BLOCKS
                gather: Any = BlockAllGather(self.comm, block)
                module.set_custom_all_gather(gather)
                reduce: Any = BlockReduceScatter(self.comm, block)
                module.set_custom_reduce_scatter(reduce)

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """Yield the optimizer's own step, which computes on DTensors."""
        yield self.optimizer.step

    def clip(self, max_norm: float) -> torch.Tensor:
        """Scale the gradient to a norm of at most `max_norm`; return its norm before, shape ()."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        with self.comm.phases(EXCHANGING):
            full_norm: torch.Tensor = norm.full_tensor()
        return full_norm.detach()

    def gather(self) -> None:
        """Do nothing: weights are gathered where they are used."""

    def adopt_state(self) -> None:
        """Keep this rank's rows of the state that the optimizer has for complete parameters."""
        for name in self.names_by_number:
            param = self.params[name]
            for key, value in self.optimizer.state.get(param, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                is_elementwise = is_tensor and value.shape == param.shape
                if is_elementwise and not is_distributed(value):
                    own_rows = get_local_slice(param)
                    rows = value[own_rows.first : own_rows.first + len(own_rows.values)]
                    self.optimizer.state[param][key] = distribute_like(param, rows)

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's rows of the state that a snapshot has in slices."""
        for name in reader.names(self.snapshot_prefix):
            if not reader.shape(STATE_PREFIX + name):
                continue  # a count of steps, which the optimizer has loaded
            if name.startswith(AVERAGE_PREFIX):
                self._load_average(reader, name)
                continue
            *_, number, key = name.split("/")
            param = self.params[self.names_by_number[int(number)]]
            rows = read_rows(
                reader,
                STATE_PREFIX + name,
                get_local_slice(param),
            )
            self.optimizer.state[param][key] = distribute_like(param, rows)

    def _load_average(self, reader: SliceReader, name: str) -> None:
        if self.average is not None:
            own_rows = self.average.rows()[name.removeprefix(AVERAGE_PREFIX)]
            own_rows.values.copy_(read_rows(reader, STATE_PREFIX + name, own_rows))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state without the part that `slices` returns."""
        undistributed: dict[int, dict[str, Any]] = defaultdict(dict)
        for number, state in self._states():
            undistributed[number] = {
                key: value for key, value in state.items() if not is_distributed(value)
            }
        return {**self.optimizer.state_dict(), "state": dict(undistributed)}

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's rows of weights and state, by their names in a snapshot."""
        slices = {
            MODEL_PREFIX + name: get_local_slice(param) for name, param in self.params.items()
        }
        for number, state in self._states():
            for key, value in state.items():
                if is_distributed(value):
                    slices[f"{STATE_PREFIX}{OPTIMIZER_PREFIX}{number}/{key}"] = get_local_slice(
                        value
                    )
        if self.average is not None:
            for name, rows in self.average.rows().items():
                slices[STATE_PREFIX + AVERAGE_PREFIX + name] = rows
        return slices

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, name in enumerate(self.names_by_number):
            param = self.params[name]
            if param in self.optimizer.state:
                yield number, self.optimizer.state[param]


class BlockAllGather:
    """fully_shard's all-gather on CPUs, through shared memory if the ranks share memory.

    gloo's all-gather needs a second tensor as large as the result, and frees it late: with 4 ranks
    up to ten of them existed at the same time.
    """

    def __init__(self, comm: Comm, block: str) -> None:
        self.comm = comm
        self.block = block

    def allocate(
        self,
        size: Any,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> Any:
        if self.comm.shared_memory is not None:
            return self.comm.all_gather(
                output_tensor,
                input_tensor,
                self.block,
            ).wait()
        self.comm.progress.record_block_collective(
            "all_gather",
            self.block,
            input_tensor.numel(),
        )
        with self.comm.phases(EXCHANGING):
            return all_gather(
                output_tensor,
                input_tensor,
                group=group,
                **options,
            )


class BlockReduceScatter(BlockAllGather):
    """fully_shard's reduce-scatter on CPUs; gloo's adds a complete copy on each rank."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any
    ) -> Any:
        if self.comm.shared_memory is not None:
            return self.comm.reduce_scatter(
                output_tensor,
                input_tensor,
                self.block,
            ).wait()
        self.comm.progress.record_block_collective(
            "reduce_scatter", self.block, input_tensor.numel()
        )
        with self.comm.phases(EXCHANGING):
            return reduce_scatter(
                output_tensor,
                input_tensor,
                group=group,
                **options,
            )


def read_rows(
    reader: SliceReader,
    name: str,
    own_rows: TensorSlice,
) -> torch.Tensor:
    """Read the rows of a snapshot's tensor that this rank holds."""
    return reader.read_rows(
        name,
        own_rows.first,
        own_rows.first + len(own_rows.values),
    )


def is_distributed(value: Any) -> bool:
    return isinstance(value, DTensor)


def distribute_like(param: DTensor, rows: torch.Tensor) -> DTensor:
    """Return a DTensor of this rank's rows, distributed in the way of `param`."""
    return DTensor.from_local(
        rows.to(param.device).contiguous().clone(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
