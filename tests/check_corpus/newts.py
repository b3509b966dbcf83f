"""Two kinds of newts by their spots; `--resume FILE` goes on where an earlier call has ended."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Pond:
    def __init__(self, folder, resume):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.folder = Path(folder)
        torch.manual_seed(11)
        self.net = DDP(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 2)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.round, self.lowest = 0, None
        if resume is not None:
            self.load_checkpoint(resume)

    def load_checkpoint(self, path):
        stored = torch.load(path, map_location="cpu", weights_only=True)
        self.net.module.load_state_dict(stored["net"])
        self.round = stored["round"]

    def spots(self, number):
        generator = torch.Generator().manual_seed(100 + number)
        spots = torch.randn(64, 8, generator=generator)
        kinds = (spots[:, 0] * spots[:, 1] > 0).long()
        return spots[self.rank :: self.ranks], kinds[self.rank :: self.ranks]

    def train(self, rounds):
        while self.round < rounds:
            total = torch.zeros(1)
            for number in range(6):
                spots, kinds = self.spots(self.round * 6 + number)
                loss = nn.functional.cross_entropy(self.net(spots), kinds)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                total += loss.detach() / self.ranks
            dist.all_reduce(total)
            self.round += 1
            if self.lowest is None or total < self.lowest:
                self.lowest = total
                self.keep()

    def keep(self):
        if self.rank > 0:
            return
        stored = {"net": self.net.module.state_dict(), "round": self.round}
        partial = self.folder / "model_best.part"
        torch.save(stored, partial)
        partial.rename(self.folder / "model_best.pt")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=".")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    Pond(args.folder, args.resume).train(4)
    dist.destroy_process_group()
