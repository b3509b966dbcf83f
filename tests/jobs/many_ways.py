"""Ways to train in parallel with torch alone; each prints numbers of which a digest stands for all bits."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4))


def drawn(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, 6, generator=generator)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(drawn(step)).square().mean().backward()
        optimizer.step()


def total(model: torch.nn.Module) -> float:
    sums = [getattr(p, "full_tensor", lambda p=p: p)().double().sum() for p in model.parameters()]
    return torch.stack(sums).sum().item()


def hooks() -> float:
    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    return total(model)


def python_hook() -> float:
    def mean(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        size = dist.get_world_size()
        return work.get_future().then(lambda future: future.value()[0] / size)

    model = DistributedDataParallel(make_model())
    model.register_comm_hook(None, mean)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    return total(model)


def power() -> float:
    """The callbacks of this hook wait for collectives that they start."""
    model = DistributedDataParallel(make_model())
    state = powerSGD_hook.PowerSGDState(None, 2, 2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, torch.optim.SGD(model.parameters(), 0.1))
    return total(model)


def no_sync() -> float:
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        with model.no_sync():
            model(drawn(step)).sum().backward()
        model(drawn(step + 9)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return total(model)


def zero() -> float:
    model = DistributedDataParallel(make_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return total(model)


def join() -> float:
    model = DistributedDataParallel(make_model())
    with Join([model]):
        train(model, torch.optim.SGD(model.parameters(), 0.1), 3 + dist.get_rank())
    return total(model)


def sharded() -> float:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train(model, optimizer)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    before = total(model)
    dcp.save({"model": model.state_dict()}, checkpoint_id=Path(folder[0]))
    train(model, optimizer)
    dcp.load({"model": model.state_dict()}, checkpoint_id=Path(folder[0]))
    assert total(model) == before
    return before


def tensors() -> float:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    rows = distribute_tensor(torch.arange(60.0).reshape(10, 6), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = (columns @ columns.t()).redistribute(mesh, [Replicate()])
    return product.to_local().double().sum().item() + columns.full_tensor().sum().item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for way in (hooks, python_hook, power, no_sync, zero, join, sharded, tensors):
        print(way.__name__, repr(way()), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
