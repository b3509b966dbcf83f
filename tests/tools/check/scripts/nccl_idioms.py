"""What scripts do with several GPUs and NCCL, as torch's documentation shows it."""

import copy
import json
import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def rows(*shape):
    return torch.full(shape, float(dist.get_rank() + 1), device="cuda")


def reductions_with_a_mean():
    x = rows(3)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 3
    work = dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True)
    assert work.wait() and work.is_completed()
    part = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(part, rows(4), op=dist.ReduceOp.AVG)
    assert part.tolist() == [1.5] * 2


def collectives_compare_numbers_of_elements():
    gathered = [torch.empty(2, 2, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, rows(4))
    assert [x.tolist() for x in gathered] == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2]
    table = torch.empty(2, 3, device="cuda")
    dist.all_gather_into_tensor(table, rows(3))
    assert table.tolist() == [[1.0] * 3, [2.0] * 3]
    dist.reduce_scatter_tensor(part := torch.empty(3, device="cuda"), rows(2, 3))
    assert part.tolist() == [3.0] * 3
    dist.reduce_scatter(part, [rows(3, 1), rows(3, 1)])
    assert part.tolist() == [3.0] * 3
    is_first = dist.get_rank() == 0
    dist.gather(rows(3), [torch.empty(3, 1) for _ in range(2)] if is_first else None, dst=0)
    dist.scatter(part, [rows(1, 3), rows(3, 1)] if is_first else None, src=0)
    assert part.tolist() == [1.0] * 3
    received = [torch.empty(3, 1) for _ in range(2)]
    dist.all_to_all(received, [rows(3), rows(3)])
    assert received[1].tolist() == [[2.0]] * 3
    dist.broadcast(rows(3) if is_first else part.view(3, 1), src=0)


def gathered_sizes_may_differ():
    gathered = [torch.empty(1, device="cuda"), torch.empty(2, device="cuda")]
    dist.all_gather(gathered, rows(dist.get_rank() + 1))
    assert [x.tolist() for x in gathered] == [[1.0], [2.0, 2.0]]


def objects_and_barriers():
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": dist.get_rank()})
    assert gathered == [{"rank": 0}, {"rank": 1}]
    sent = ["settings"] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(sent, src=0, device=torch.device("cuda", dist.get_rank()))
    assert sent == ["settings"]
    dist.barrier(device_ids=[dist.get_rank()])


def groups_of_nccl():
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 4
    group = dist.new_group([0, 1], backend="nccl", pg_options=options)
    dist.all_reduce(rows(1), group=group)
    pairs = dist.split_group(split_ranks=[[0], [1]])
    assert dist.get_world_size(pairs) == 1
    assert dist.is_nccl_available()


def distributed_data_parallel():
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 2).to(rank), [rank], rank, find_unused_parameters=True)
    assert model.find_unused_parameters
    other = DDP(nn.Linear(3, 2).cuda(), device_ids=[torch.device("cuda", rank)], output_device=rank)
    for wrapped in (model, other):
        (wrapped(rows(4, 3)).sum() * (rank + 1)).backward()
        gradient = wrapped.module.weight.grad.clone()
        dist.broadcast(gradient, 0)
        assert torch.equal(gradient, wrapped.module.weight.grad) and gradient.sum() == 60
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    model(rows(4, 3)).sum().backward()


def batch_norm_over_all_ranks():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).double()
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).cuda()
    assert isinstance(model[1], nn.SyncBatchNorm)
    synchronized = DDP(model, device_ids=[dist.get_rank()])
    samples = torch.randn(8, 2, 4, 4, dtype=torch.float64)
    factors = torch.randn(8, 3, 4, 4, dtype=torch.float64)
    mine = slice(0, 3) if dist.get_rank() == 0 else slice(3, 8)
    for _ in range(2):
        synchronized.zero_grad()
        (synchronized(samples[mine].cuda()) * factors[mine]).sum().backward()
        plain.zero_grad()
        (plain(samples) * factors).sum().backward()
    for name, value in plain.named_parameters():
        gradient = dict(model.named_parameters())[name].grad * 2  # DDP has divided by two
        assert torch.allclose(gradient, value.grad), name
    for name, value in plain.named_buffers():
        assert torch.allclose(dict(model.named_buffers())[name], value), name
    model.eval()
    assert model(samples).shape == (8, 3, 4, 4)


def sharded_models():
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    for device_id in (rank, torch.device("cuda", rank), torch.cuda.current_device(), None):
        model = FSDP(nn.Linear(4, 4).cuda(), device_id=device_id)
        optimizer = torch.optim.Adam(model.parameters())
        model(rows(2, 4)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
    mesh = dist.init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    for model in (nn.Linear(4, 4), nn.Linear(4, 4, device="cuda")):
        fully_shard(model, mesh=mesh)
        model(rows(2, 4)).sum().backward()
        torch.optim.AdamW(model.parameters()).step()
    fully_shard(without_mesh := nn.Linear(4, 4))
    without_mesh(rows(2, 4)).sum().backward()


def main(rank=0, folder=""):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=2,
        device_id=torch.device(f"cuda:{rank}"),
    )
    results = {}
    for example in EXAMPLES:
        try:
            example()
            results[example.__name__] = ""
        except Exception:
            results[example.__name__] = traceback.format_exc()
            break  # the other rank may wait
    if rank == 0 or any(results.values()):
        print(json.dumps(results), flush=True)
    sys.stdout.flush()
    dist.destroy_process_group()
    sys.exit(any(results.values()))


EXAMPLES = [
    reductions_with_a_mean,
    collectives_compare_numbers_of_elements,
    gathered_sizes_may_differ,
    objects_and_barriers,
    groups_of_nccl,
    distributed_data_parallel,
    batch_norm_over_all_ranks,
    sharded_models,
]

if __name__ == "__main__":
    mp.spawn(main, (os.environ.get("EXAMPLES", os.getcwd()),), nprocs=torch.cuda.device_count())
