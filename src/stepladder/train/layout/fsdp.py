"""`--shard full`: each rank holds its rows of the weights, the gradients and the optimizer's state.

Stage 3 of ZeRO (Rajbhandari et al., SC 2020), by torch's own fully_shard (FSDP2): a block's weights
are gathered before its forward and before its backward, and freed after it; its gradient is added
over ranks in slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from stepladder.core.errors import InputError, to_one_line
from stepladder.core.plan import Span, add_idle_spans
from stepladder.storage.snapshot_slices import (
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    STATE_PREFIX,
    SliceReader,
    TensorSlice,
    get_local_slice,
    read_rows,
)
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.layout.base import StateLayout
from stepladder.train.model_blocks import OUTSIDE_BLOCKS, find_blocks, validate_fully_shardable
from stepladder.train.optimizers import ELEMENTWISE_OPTIMIZERS, load_state, validate_optimizer
from stepladder.train.phases import EXCHANGING
from stepladder.train.sync.base import Sync
from stepladder.train.sync.fully_sharded import FullyShardedSync

# As fully_shard calls them; before torch 2.13 they had other names.
GLOO: dict[str, Any] = {
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
}

# Texts of errors that torch raises in C++, where no frame tells that rows of weights are meant: of
# an operation on rows and other tensors, of Tensor.numpy, of a backward or a torch.func.jvp after
# the weights are freed, of autograd.grad by a weight of which the loss has not used the rows, and
# of a sparse gradient.
NATIVE_ERRORS = (
    "mixed torch.Tensor and DTensor",
    "tensor subclass",
    "storage of size 0",
    "doesn't have storage",
    "not have been used in the graph",
    "SparseCPU",
)

# torch caches what it knows of a mesh also for an equal mesh, so each mesh gets its own name.
MESH_NUMBERS = count()


class FullyShardedLayout(StateLayout):
    """A job whose weights and optimizer state are spread over the ranks by rows, as DTensors.

    The optimizer is the job's own, with its groups and its schedule.
    """

    gathers_weights = True
    has_parts = True
    slice_prefix = STATE_PREFIX

    def __init__(self, job: Job, comm: Comm) -> None:
        super().__init__(job, comm)
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
        initial_state: Any = job.optimizer.state  # Adagrad has some before its first step
        state = {self.params[names[param]]: values for param, values in initial_state.items()}
        job.optimizer.state = defaultdict(dict, state)
        self.adopt_state()

    def _configure_modules(self) -> None:
        """Have fully_shard compute sums, and on a CPU use the collectives of `comm`."""
        for path, module in self.model.named_modules():
            if not isinstance(module, FSDPModule):
                continue
            module.set_gradient_divide_factor(1.0)  # sums are divided by what the loss counts
            module.set_force_sum_reduction_for_comms(True)
            _OwnWeights(module).watch()
            if self.comm.device.type == "cpu":
                block = path or OUTSIDE_BLOCKS
                gather: Any = _BlockAllGather(self.comm, block)
                module.set_custom_all_gather(gather)
                reduce: Any = _BlockReduceScatter(self.comm, block)
                module.set_custom_reduce_scatter(reduce)

    @staticmethod
    def validate(job: Job) -> None:
        """Raise InputError if the optimizer or a weight of the model cannot be cut into rows."""
        validate_optimizer(job.optimizer, ELEMENTWISE_OPTIMIZERS, "full")
        validate_fully_shardable(job)

    @staticmethod
    def move_model(job: Job, comm: Comm) -> None:
        """Leave the model where it is: its blocks are moved one by one."""

    def microbatches(self, spans_by_rank: list[list[Span]]) -> list[Span]:
        """Return as many passes on each rank, since a pass gathers weights."""
        return add_idle_spans(super().microbatches(spans_by_rank), spans_by_rank)

    def make_sync(self, mode: str, extra_size: int) -> Sync:
        """Return what divides the sums that fully_shard leaves in the gradients."""
        return FullyShardedSync(self.model, self.comm, extra_size)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradient to a norm of at most `max_norm`; return its norm before, shape ()."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        with self.comm.phases(EXCHANGING):
            full_norm: Tensor = norm.full_tensor()
        return full_norm.detach()

    def explain(self, error: Exception) -> None:
        """Raise InputError for an error about a weight of which this rank has its rows only."""
        folder = str(Path(torch.distributed.tensor.__file__).parent)
        frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
        is_of_rows = any(name.startswith(folder) for name in frames)
        is_of_rows |= frames[-1].startswith(str(Path(torch.distributed.fsdp.__file__).parent))
        is_of_rows |= any(text in str(error) for text in NATIVE_ERRORS)
        if is_of_rows:
            raise InputError(
                "--shard full: the loss uses weights where they are not gathered"
                f" ({to_one_line(str(error))})",
                "use weights in forward of the model or of its blocks only, which gather them, and"
                " no second derivative; or --shard optimizer",
            ) from error

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Load the optimizer's state, and keep this rank's rows of what is whole."""
        load_state(self.optimizer, stored)
        self.adopt_state()

    def adopt_state(self) -> None:
        """Keep this rank's rows of the state that the optimizer has for complete parameters."""
        for name in self.names_by_number:
            param = self.params[name]
            for key, value in self.optimizer.state.get(param, {}).items():
                is_tensor = isinstance(value, Tensor)
                is_elementwise = is_tensor and value.shape == param.shape
                if is_elementwise and not is_distributed(value):
                    own_rows = get_local_slice(param)
                    rows = value[own_rows.first : own_rows.first + len(own_rows.values)]
                    self.optimizer.state[param][key] = distribute_like(param, rows)

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's rows of the state that a snapshot has in slices."""
        prefix = STATE_PREFIX + OPTIMIZER_PREFIX
        for name in reader.names(prefix):
            if not reader.shape(prefix + name):
                continue  # a count of steps, which the optimizer has loaded
            number, key = name.split("/")
            param = self.params[self.names_by_number[int(number)]]
            rows = read_rows(reader, prefix + name, get_local_slice(param))
            self.optimizer.state[param][key] = distribute_like(param, rows)

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
        return slices

    def _states(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, name in enumerate(self.names_by_number):
            param = self.params[name]
            if param in self.optimizer.state:
                yield number, self.optimizer.state[param]


class _OwnWeights:
    """Refuses passes of a block with other weights, which fully_shard would replace by its own.

    So does torch.func.functional_call: a teacher of fixed weights would have those of its student.

    Args:
        block: A module of fully_shard.
    """

    def __init__(self, block: Any) -> None:
        self.block = block
        modules: list[Any] = list(block.modules())
        inner_blocks: list[Any] = [
            module for module in modules[1:] if isinstance(module, FSDPModule)
        ]
        inner = {part for module in inner_blocks for part in module.modules()}
        self.modules = [module for module in modules if module not in inner]
        # Those of this rank's rows, and the complete ones once they were gathered.
        self.known = set(self.weights())

    def weights(self) -> Iterator[Tensor]:
        for module in self.modules:
            yield from module.parameters(recurse=False)

    def watch(self) -> None:
        """Look at the weights before and after fully_shard gathers them."""
        self.block.register_forward_pre_hook(self.require_known, prepend=True)
        self.block.register_forward_pre_hook(self.learn_gathered)

    def require_known(self, *_: Any) -> None:
        if not self.known.issuperset(self.weights()):
            raise InputError(
                "--shard full: the model is called with other weights than its own, as by"
                " functional_call, and fully_shard would use its own",
                "a copy of the model with the other weights, or --shard optimizer",
            )

    def learn_gathered(self, *_: Any) -> None:
        self.known.update(self.weights())


class _BlockAllGather:
    """fully_shard's all-gather on CPUs, through shared memory if the ranks share memory.

    gloo's all-gather needs a second tensor as large as the result, and frees it late: with 4 ranks
    up to ten of them existed at the same time. Its reduce-scatter adds a complete copy on each.
    """

    name = "all_gather"

    def __init__(self, comm: Comm, block: str) -> None:
        self.comm = comm
        self.block = block

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **options: Any
    ) -> Any:
        if self.comm.shared_memory is not None:
            collective = getattr(self.comm, self.name)
            return collective(output_tensor, input_tensor, self.block).wait()
        self.comm.progress.record_block_collective(self.name, self.block, input_tensor.numel())
        with self.comm.phases(EXCHANGING):
            return GLOO[self.name](output_tensor, input_tensor, group=group, **options)


class _BlockReduceScatter(_BlockAllGather):
    """fully_shard's reduce-scatter on CPUs."""

    name = "reduce_scatter"


def is_distributed(value: Any) -> bool:
    return isinstance(value, DTensor)


def distribute_like(param: DTensor, rows: Tensor) -> DTensor:
    """Return a DTensor of this rank's rows, distributed in the way of `param`."""
    return DTensor.from_local(
        rows.to(param.device).contiguous().clone(),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
