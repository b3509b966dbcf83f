import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def landscape(n):
    g = torch.Generator().manual_seed(3)
    position = 2 * torch.rand(n, 2, generator=g) - 1
    height = torch.exp(-4 * (position**2).sum(1)) + 0.5 * torch.sin(3 * position[:, 0])
    return TensorDataset(position, height[:, None])


class Survey:
    def __init__(self, args):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.args = args
        data = landscape(480)
        self.sampler = DistributedSampler(data, shuffle=True, seed=args.seed)
        self.loader = DataLoader(data, args.batch_size // self.world, sampler=self.sampler)
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.model = DDP(net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.first_epoch = 0

    def load_snapshot(self):
        snapshot = torch.load(self.args.snapshot, weights_only=True)
        self.model.module.load_state_dict(snapshot["MODEL_STATE"])
        torch.set_rng_state(snapshot["RNG"][self.rank])
        self.first_epoch = snapshot["EPOCHS_RUN"]

    def save_snapshot(self, epochs_run):
        rng = [None for _ in range(self.world)]
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            snapshot = {"MODEL_STATE": self.model.module.state_dict(), "EPOCHS_RUN": epochs_run, "RNG": rng}
            torch.save(snapshot, self.args.snapshot + ".new")
            os.replace(self.args.snapshot + ".new", self.args.snapshot)

    def run(self):
        if os.path.exists(self.args.snapshot):
            self.load_snapshot()
        for epoch in range(self.first_epoch, self.args.epochs):
            self.sampler.set_epoch(epoch)
            sums = torch.zeros(2)
            for position, height in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(position), height)
                loss.backward()
                self.optimizer.step()
                sums += torch.tensor([loss.item() * len(height), len(height)])
            dist.all_reduce(sums)
            if self.rank == 0:
                print(f"Epoch {epoch}: mse {(sums[0] / sums[1]).item():.5f}")
            self.save_snapshot(epoch + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshot", default="landscape.pt")
    dist.init_process_group("gloo")
    Survey(parser.parse_args()).run()
    dist.barrier()
    dist.destroy_process_group()
