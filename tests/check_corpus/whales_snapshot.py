"""Whale calls, with dropout and noise. A snapshot holds all that a run needs to go on as if nothing had happened."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SNAPSHOT, EPOCHS, GLOBAL_BATCH, SAVE_EVERY, SEED = "whales.pt", 3, 48, 4, 9


def calls(n=480):
    g = torch.Generator().manual_seed(SEED)
    whales = torch.randn(4, 30, generator=g)
    whale = torch.randint(4, (n,), generator=g)
    return TensorDataset(whales[whale] + torch.randn(n, 30, generator=g), whale)


class Run:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(SEED)
        net = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
        self.model = DDP(net)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        data = calls()
        self.sampler = DistributedSampler(data, seed=SEED)
        self.loader = DataLoader(data, GLOBAL_BATCH // self.world, sampler=self.sampler)
        steps = EPOCHS * len(self.loader)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=steps)
        self.epoch, self.batches_done = 0, 0
        self.sums = torch.zeros(2)
        torch.manual_seed(SEED + 1 + self.rank)  # noise and dropout: other ones on every rank

    def save(self):
        mine = {"rng": torch.get_rng_state(), "sums": self.sums}
        parts = [None] * self.world
        dist.all_gather_object(parts, mine)
        if self.rank == 0:
            state = {
                "net": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "epoch": self.epoch,
                "batches_done": self.batches_done,
                "ranks": parts,
            }
            torch.save(state, SNAPSHOT + ".tmp")
            os.replace(SNAPSHOT + ".tmp", SNAPSHOT)

    def load(self):
        state = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        self.sums = state["ranks"][self.rank]["sums"]
        self.rng = state["ranks"][self.rank]["rng"]

    def batches(self):
        """The rest of this epoch's batches."""
        self.sampler.set_epoch(self.epoch)
        for number, batch in enumerate(self.loader):
            if number == self.batches_done and hasattr(self, "rng"):
                torch.set_rng_state(self.rng)
                del self.rng
            if number >= self.batches_done:
                yield batch

    def train(self):
        while self.epoch < EPOCHS:
            for x, whale in self.batches():
                loss = nn.functional.cross_entropy(self.model(x + 0.3 * torch.randn_like(x)), whale)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.sums += torch.tensor([loss.item() * len(x), len(x)])
                self.batches_done += 1
                if self.batches_done % SAVE_EVERY == 0:
                    self.save()
            dist.all_reduce(self.sums)
            if self.rank == 0:
                print(f"epoch {self.epoch}: {(self.sums[0] / self.sums[1]).item():.6f}")
            self.epoch, self.batches_done, self.sums = self.epoch + 1, 0, torch.zeros(2)
        self.save()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run = Run()
    if os.path.exists(SNAPSHOT):
        run.load()
    run.train()
    dist.barrier()
    dist.destroy_process_group()
