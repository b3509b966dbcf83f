"""stepladder run --nproc N [--exchange gloo] benchmarks/ddp_exchange_rank.py steps|collectives [--short]

What each rank of ddp_exchange.py does: a plain script, which knows nothing of shared memory. The
first rank prints its figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from stepladder.recipes.mlp import Config, build, squared_error

Step = Callable[[], None]

BATCH = 128  # of all ranks together, of the MLP; of the others a part of it
BLOCKS = 5
COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
CALLS = {8: 100, 1_000: 100, 64_000: 60, 1_000_000: 30, 10_000_000: 10, 100_000_000: 5}
IDLE_S = 1.0
MEASURED_S = 1.0
WARM_UP_STEPS = 20


class CharacterGPT(nn.Module):
    """A transformer of two blocks that predicts the next of 65 characters."""

    def __init__(self, width: int = 64, context: int = 32) -> None:
        super().__init__()
        self.characters = nn.Embedding(65, width)
        self.places = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, 65)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(text) + self.places
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


def mlp_step() -> Step:
    """A step of an MLP 20-64-1 on a slice of a permutation, as in exchange.py."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    job = build(Config())
    model = DistributedDataParallel(job.model)
    inputs, targets = job.train_data
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    share = BATCH // size
    position = 0

    def step() -> None:
        nonlocal position
        position = (position + BATCH) % (len(inputs) - BATCH)
        rows = order[position + share * rank : position + share * (rank + 1)]
        loss, count = squared_error(model, [inputs[rows], targets[rows]])
        (loss / count).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    return step


def classifier_step(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    """A step of a model that is wrapped already, always on the same batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def conv_step() -> Step:
    """A step of two convolutions on 64 pictures of 28 x 28 points."""
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 10)),
    )
    share = 64 // dist.get_world_size()
    pictures = torch.randn(share, 1, 28, 28)
    return classifier_step(DistributedDataParallel(net), pictures, torch.randint(10, (share,)))


def gpt_step(is_sharded: bool) -> Step:
    """A step of the character GPT on 16 texts, under DDP or under FSDP2."""
    model: nn.Module = CharacterGPT()
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    text = torch.randint(65, (16 // dist.get_world_size(), 33))
    return classifier_step(model, text[:, :-1], text[:, 1:])


def measure_steps(is_short: bool) -> dict[str, float]:
    """Return microseconds a step for each model, over a second on gloo and in shared memory.

    A pause of the machine counts the same in both then. As many steps on gloo as in shared memory
    would take four times as long.
    """
    cases = {
        "MLP 20-64-1": mlp_step,
        "small conv net": conv_step,
        "character GPT": lambda: gpt_step(False),
        "character GPT, FSDP2": lambda: gpt_step(True),
    }
    found = {}
    for name, make_step in cases.items():
        torch.manual_seed(0)
        step = make_step()
        for _ in range(WARM_UP_STEPS):
            step()
        estimate = torch.tensor(seconds_a_step(step, WARM_UP_STEPS))
        dist.broadcast(estimate, 0)
        steps = max(5, int(MEASURED_S / (10 if is_short else 1) / estimate.item()))
        found[name] = 1e6 * seconds_a_step(step, steps)
    return found


def seconds_a_step(step: Step, steps: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began
    dist.barrier()  # else one has the machine for itself at the end
    return seconds / steps


def collective(name: str, size: int) -> Step:
    """Return a call of a collective whose larger tensor has about `size` bytes on each rank."""
    ranks = dist.get_world_size()
    part = torch.full([max(1, size // 4 // ranks)], 0.0)  # zeros: a sum of sums does not overflow
    whole = torch.full([len(part) * ranks], 0.0)
    calls: dict[str, Step] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    if name in calls:
        return calls[name]
    target = torch.full_like(whole, 0.0)
    return lambda: dist.all_to_all_single(target, whole)


def seconds_a_call(call: Step, calls: int) -> float:
    """Return the median of several blocks, on the rank where it is longest."""
    blocks = []
    for _ in range(BLOCKS):
        dist.barrier()
        began = time.perf_counter()
        for _ in range(max(1, calls // BLOCKS)):
            call()
        blocks.append((time.perf_counter() - began) / max(1, calls // BLOCKS))
    slowest = torch.tensor(median(blocks))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def measure_collectives(is_short: bool) -> dict[str, float]:
    """Return microseconds a call, and what part of a core a rank takes that waits."""
    found = {}
    for name in COLLECTIVES:
        for size, calls in CALLS.items():
            if not is_short or size <= 1_000_000:
                call = collective(name, size)
                call()
                found[f"{name} {size}"] = 1e6 * seconds_a_call(call, calls)
    found["barrier 0"] = 1e6 * seconds_a_call(dist.barrier, CALLS[8])
    found["idle"] = idle_share()
    return found


def idle_share() -> float:
    """Return the most of a core that a rank takes while it waits for the first one."""
    dist.barrier()
    wall = time.perf_counter()
    used = time.process_time()
    if dist.get_rank() == 0:
        time.sleep(IDLE_S)  # the others wait for this rank
    dist.all_reduce(torch.ones(10))
    share = torch.tensor((time.process_time() - used) / (time.perf_counter() - wall))
    dist.all_reduce(share, dist.ReduceOp.MAX)
    return share.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["steps", "collectives"])
    parser.add_argument("--short", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # new names of torch 2.13; what FSDP2 says about views
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measure = measure_steps if args.what == "steps" else measure_collectives
    found = measure(args.short)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
