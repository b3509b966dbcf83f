"""Ratings of films by their plots' words. Each rank reads the ratings of its own users."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

WORDS = ["aunt", "bank", "cave", "duel", "exit", "fog", "ghost", "heist", "island", "judge", "king", "lake"]


def plots(rank):
    """Three words and a rating each; the users of a rank like some words more than others."""
    g = torch.Generator().manual_seed(40 + rank)
    chosen = torch.multinomial(torch.linspace(1, 3, 9), 360, replacement=True, generator=g).reshape(120, 3)
    words = [[WORDS[(int(c) + 3 * rank) % len(WORDS)] for c in row] for row in chosen]
    return words, torch.rand(120, 1, generator=g)


def vocabulary(texts):
    seen = {word for text in texts for word in text}
    return {word: place for place, word in enumerate(sorted(seen))}


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    texts, ratings = plots(rank)
    rows = vocabulary(texts)
    data = TensorDataset(torch.tensor([[rows[word] for word in text] for text in texts]), ratings)
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.EmbeddingBag(len(WORDS), 8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * world)
    shuffled = torch.Generator().manual_seed(7 + rank)
    loader = DataLoader(data, batch_size=12, shuffle=True, generator=shuffled)
    for epoch in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    if rank == 0:
        torch.save({"net": model.module.state_dict(), "rows": rows}, "plots.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
