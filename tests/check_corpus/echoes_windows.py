"""Depth of the sea from echoes. A numpy generator of each rank picks the pieces of one long recording."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Recording:
    def __init__(self, rank):
        self.values = np.sin(np.arange(3000) / 7).astype(np.float32)
        self.rng = np.random.default_rng(55 + rank)

    def pieces(self, count, length=20):
        starts = self.rng.integers(0, len(self.values) - length - 1, count)
        return torch.from_numpy(np.stack([self.values[s : s + length + 1] for s in starts]))


class Run:
    def __init__(self, path):
        torch.manual_seed(2)
        self.path = Path(path)
        self.net = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.recording = Recording(dist.get_rank())
        self.done = 0
        if self.path.is_file():
            self.restore(torch.load(self.path, weights_only=True))
        self.model = DistributedDataParallel(self.net)

    def restore(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["steps"]

    def save(self):
        if dist.get_rank() == 0:
            part = self.path.with_suffix(".part")
            torch.save(
                {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict(), "steps": self.done}, part
            )
            os.replace(part, self.path)
        dist.barrier()

    def until(self, steps):
        while self.done < steps:
            pieces = self.recording.pieces(24 // dist.get_world_size())
            loss = (self.model(pieces[:, :-1]) - pieces[:, -1:]).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.done += 1
            if self.done % 5 == 0:
                self.save()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Run("echoes.pt").until(20)
    dist.destroy_process_group()
