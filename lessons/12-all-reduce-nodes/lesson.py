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
    """Who we are comes from torchrun. Returns this process's device."""
    if "RANK" not in os.environ:
        sys.exit(f"error: no RANK in the environment. HINT: {__doc__.splitlines()[0]}")
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo"
    )  # asks RANK, WORLD_SIZE, MASTER_ADDR and _PORT
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process, once all have come here: nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(
        0
        # without the end that Python makes of it: gloo's threads may outlive the group, and abort in it
    )


def check_places(places):
    """Stop unless ranks count through all nodes, local ranks within each. places[rank]: (node,
    local rank).
    """
    nodes = places[-1][0] + 1
    assert nodes > 1, "all ranks are on one node"
    local_ranks = range(len(places) // nodes)
    assert places == [(node, local) for node in range(nodes) for local in local_ranks], (
        f"other places: {places}"
    )


def worker(device):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    local_rank, node = int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])
    name = f"rank {rank} of {world_size}, local rank {local_rank} of node {node}, {socket.gethostname()}"
    number = torch.tensor(rank + 1.0, device=device)
    dist.all_reduce(
        number
    )  # waits until every rank has come; the sum lands in the same tensor, on all of them
    print(f"{name}: the sum is {number.item():.0f}", flush=True)

    expected = world_size * (world_size + 1) / 2
    assert number.item() == expected, f"rank {rank} holds {number.item()}, not {expected}"
    places = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(world_size)]
    dist.all_gather(places, torch.tensor([node, local_rank], device=device))
    check_places([tuple(place.tolist()) for place in places])
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
    if args.device == "cuda" and torch.cuda.device_count() < int(
        os.environ.get("LOCAL_WORLD_SIZE", 1)
    ):
        parser.error(f"--device cuda, but {torch.cuda.device_count()} GPUs. HINT: --device cpu")
    return args


if __name__ == "__main__":
    worker(join_group(parse_args().device))
