"""stepladder run --nproc N [--exchange gloo] benchmarks/ddp_exchange_scripts.py mnist|gpt FOLDER [--steps N]

Two trainings as a user writes them, with plain DDP, a DataLoader and a DistributedSampler, for
ddp_exchange.py. The first rank prints seconds and the mean loss of the last steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_exchange_rank import CharacterGPT
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from stepladder.recipes.gpt import read_tokens
from stepladder.recipes.mnist import compute_logits, read_data, small_net

CONTEXT = 32
LAST_STEPS = 50  # whose losses are averaged


class Texts(Dataset):
    """Every piece of a text, with one character more than a model sees at once."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens.long()

    def __len__(self) -> int:
        return len(self.tokens) - CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.tokens[index : index + CONTEXT + 1]
        return piece[:-1], piece[1:]


class Digits(nn.Module):
    """A small network that takes pictures of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return compute_logits(self.net, images)


def make_task(name: str, folder: Path) -> tuple[nn.Module, Dataset, int]:
    """Return a model, its data, and the samples of a step of all ranks."""
    if name == "mnist":
        (images, labels), _ = read_data(folder)
        return Digits(), TensorDataset(images, labels.long()), 128
    tokens, _ = read_tokens(folder / "input.txt", CONTEXT)
    return CharacterGPT(context=CONTEXT), Texts(tokens), 32


def endless(loader: DataLoader, sampler: DistributedSampler) -> Iterator[list[torch.Tensor]]:
    for epoch in range(10**9):
        sampler.set_epoch(epoch)
        yield from loader


def train(name: str, folder: Path, steps: int) -> dict[str, float]:
    """Train; return the seconds and the mean loss of all ranks at the end."""
    torch.manual_seed(0)
    network, data, batch = make_task(name, folder)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch // dist.get_world_size(), sampler=sampler)
    losses = torch.zeros(steps)
    began = time.perf_counter()
    for step, (inputs, targets) in zip(range(steps), endless(loader, sampler), strict=False):
        loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    seconds = time.perf_counter() - began
    last = losses[-LAST_STEPS:].mean()
    dist.all_reduce(last)
    return {"seconds": seconds, "loss": last.item() / dist.get_world_size()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["mnist", "gpt"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = train(args.name, args.folder, args.steps)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
