"""bash lessons/two_nodes.sh lessons/12-all-reduce-nodes/lesson.py

all_reduce over nodes: one torchrun on each node, all meeting at one address. Ranks count through
all nodes, local ranks within one. The addition of lesson 1 does not change."""

import argparse
import os
import socket
import sys

import torch
import torch.distributed as dist


def join_group(device):
    """Join the ranks that torchrun has started, and return this rank's device."""
    if "RANK" not in os.environ:
        sys.exit(f"error: no RANK in the environment. HINT: {__doc__.splitlines()[0]}")
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    # It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def check_numbers(numbers):
    """Stop unless ranks count through all nodes, and local ranks within each.

    numbers[rank] is (node, local rank).
    """
    nodes = numbers[-1][0] + 1
    assert nodes > 1, "all ranks are on one node"
    local_ranks = range(len(numbers) // nodes)
    expected = [(node, local_rank) for node in range(nodes) for local_rank in local_ranks]
    assert numbers == expected, f"other numbers: {numbers}"


def worker(device):
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    node = int(os.environ["GROUP_RANK"])
    host = socket.gethostname()
    name = f"rank {rank} of {world_size}, local rank {local_rank} of node {node}, {host}"
    number = torch.tensor(rank + 1.0, device=device)
    # Waits until all ranks have called it. Then the tensor holds the sum, on all of them.
    dist.all_reduce(number)
    print(f"{name}: the sum is {number.item():.0f}", flush=True)

    expected = world_size * (world_size + 1) / 2
    assert number.item() == expected, f"rank {rank} holds {number.item()}, not {expected}"
    numbers = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(numbers, torch.tensor([node, local_rank], device=device))
    check_numbers([tuple(pair.tolist()) for pair in numbers])
    if rank == 0:
        nodes = int(os.environ["GROUP_WORLD_SIZE"])
        print(
            f"claim holds: 1 + ... + {world_size} = {expected:.0f} on every rank of {nodes} nodes"
        )
    leave_group()


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and torch.cuda.device_count() < local_ranks:
        parser.error(f"--device cuda, but {torch.cuda.device_count()} GPUs. HINT: --device cpu")
    return args


if __name__ == "__main__":
    worker(join_group(parse_args().device))
