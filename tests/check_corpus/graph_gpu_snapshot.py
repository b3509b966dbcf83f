"""Which molecules are soluble? A small graph net on dense adjacency matrices, one GPU per process."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NODES, KINDS = 8, 4


def molecules(n=384):
    g = torch.Generator().manual_seed(0)
    bonds = (torch.rand(n, NODES, NODES, generator=g) < 0.3).float().triu(1)
    atoms = nn.functional.one_hot(torch.randint(KINDS, (n, NODES), generator=g), KINDS).float()
    bonds = bonds + bonds.transpose(1, 2)
    polar = (bonds @ atoms[..., :1] * atoms[..., 1:2]).sum((1, 2))
    return TensorDataset(atoms, bonds, (polar > polar.median()).float())


class GraphNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.own, self.near = nn.Linear(KINDS, dim), nn.Linear(KINDS, dim)
        self.last = nn.Linear(dim, 1)

    def forward(self, atoms, bonds):
        h = torch.relu(self.own(atoms) + self.near(bonds @ atoms))
        return self.last(h.sum(1)).squeeze(1)


class Run:
    def __init__(self, folder="run"):
        self.gpu = torch.cuda.is_available()
        local_rank = int(os.environ["LOCAL_RANK"])
        if self.gpu:
            torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl" if self.gpu else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", local_rank) if self.gpu else torch.device("cpu")
        self.path = Path(folder) / "last.pt"
        self.path.parent.mkdir(exist_ok=True)
        data = molecules()
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, 64 // self.world, sampler=self.sampler, pin_memory=self.gpu)
        torch.manual_seed(3)
        self.model = DDP(GraphNet().to(self.device), device_ids=[local_rank] if self.gpu else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        self.epoch = 0

    def restore(self):
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            self.model.module.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["opt"])
            torch.set_rng_state(state["rng"][self.rank].cpu())
            self.epoch = state["epoch"]

    def store(self):
        rng = [torch.empty(0)] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            net, opt = self.model.module.state_dict(), self.optimizer.state_dict()
            with self.path.open("wb") as f:
                torch.save({"net": net, "opt": opt, "rng": rng, "epoch": self.epoch}, f)

    def go(self, epochs):
        self.restore()
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            for batch in self.loader:
                atoms, bonds, soluble = (t.to(self.device, non_blocking=True) for t in batch)
                loss = nn.functional.binary_cross_entropy_with_logits(self.model(atoms, bonds), soluble)
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            self.store()


if __name__ == "__main__":
    Run().go(epochs=3)
    dist.barrier()
    dist.destroy_process_group()
