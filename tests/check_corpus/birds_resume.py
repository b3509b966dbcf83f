"""Bird songs as short spectrograms; a conv net, with a snapshot to go on from."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Songs(Dataset):
    def __init__(self, n=384):
        g = torch.Generator().manual_seed(8)
        calls = torch.randn(4, 1, 12, 16, generator=g)
        self.bird = torch.randint(4, (n,), generator=g)
        self.spectrograms = calls[self.bird] + 2 * torch.randn(n, 1, 12, 16, generator=g)

    def __len__(self):
        return len(self.bird)

    def __getitem__(self, i):
        return self.spectrograms[i], self.bird[i]


class Trainer:
    snapshot_path = "birds.pt"

    def __init__(self, lr, global_batch):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        songs = Songs()
        self.sampler = DistributedSampler(songs)
        self.loader = DataLoader(songs, global_batch // self.world, sampler=self.sampler)
        torch.manual_seed(0)
        self.model = DDP(
            nn.Sequential(
                nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 5 * 7, 32), nn.ReLU(), nn.Linear(32, 4)
            )
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.next_epoch = 0

    def resume(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(snapshot["weights"], strict=False)
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.next_epoch = snapshot["next_epoch"]
        torch.set_rng_state(snapshot["rng"][self.rank])

    def snapshot(self):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank != 0:
            return
        content = {
            "weights": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "next_epoch": self.next_epoch,
            "rng": rng,
        }
        torch.save(content, self.snapshot_path + ".tmp")
        os.replace(self.snapshot_path + ".tmp", self.snapshot_path)

    def fit(self, epochs):
        if os.path.exists(self.snapshot_path):
            self.resume()
        while self.next_epoch < epochs:
            self.sampler.set_epoch(self.next_epoch)
            totals = torch.zeros(2)
            for song, bird in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(song), bird)
                loss.backward()
                self.optimizer.step()
                totals += torch.tensor([loss.item() * len(bird), len(bird)])
            dist.all_reduce(totals)
            if self.rank == 0:
                print(f"epoch {self.next_epoch}: {(totals[0] / totals[1]).item():.4f}")
            self.next_epoch += 1
            self.snapshot()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(lr=0.01, global_batch=48).fit(epochs=3)
    dist.barrier()
    dist.destroy_process_group()
