"""Groups of some of the ranks, in all the ways of torch: what each rank gets, on 3 or 4 ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.set_num_threads(1)
dist.init_process_group("cpu:gloo")  # to split gloo for several kinds of devices hangs
rank, size = dist.get_rank(), dist.get_world_size()
results: list[Any] = []


def add(group: Any) -> None:
    total = torch.full((5,), rank + 1.0)
    dist.all_reduce(total, group=group)
    results.append(total.tolist())


def add_on_lists() -> None:
    """Groups that overlap, that are in one another, and one of one rank."""
    lists = [0, 1], [1, 2], [2, 0], list(range(size)), [size - 1]
    groups = [dist.new_group(ranks) for ranks in lists]
    for group, ranks in zip(groups, lists, strict=True):
        if rank in ranks:
            add(group)
            names: list[Any] = [None] * len(ranks)
            dist.all_gather_object(names, f"rank {rank}", group)
            message = torch.tensor([rank])
            dist.broadcast(message, ranks[-1], group)
            results.extend([names, message.item()])
    halves = [[0, 1], list(range(2, size))]
    add(dist.new_subgroups_by_enumeration(halves)[0])
    mine = halves[rank in halves[1]]
    split = dist.group.WORLD.split_group(mine, timedelta(seconds=60), None, f"split {mine}")
    whole = torch.ones(3)
    split.allreduce([whole]).wait()
    results.append(whole.tolist())


def use_mesh() -> None:
    mesh = init_device_mesh("cpu", (size,))
    numbers = torch.arange(40.0).view(10, 4)
    rows = distribute_tensor(numbers, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    results.extend([columns.to_local().tolist(), (rows.t() @ rows).full_tensor().tolist()])
    pair = DeviceMesh("cpu", [0, 2])
    if rank in (0, 2):
        add(pair.get_group())


def use_square() -> None:
    """Tensor parallelism within two pairs, FSDP2 between them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for axis in ("dp", "tp"):
        add(mesh[axis].get_group())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(3):
        torch.manual_seed(10 * step + mesh["dp"].get_local_rank())
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())


add_on_lists()
use_mesh()
if size == 4:
    use_square()
dist.destroy_process_group()
print(results)
