"""Tell three tones apart. The loader's workers mix noise into each clip."""

import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

RATE, LENGTH = 800, 64
TONES = (40, 70, 110)


class Clips(Dataset):
    def __init__(self, count):
        self.labels = np.random.default_rng(0).integers(len(TONES), size=count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        time = np.arange(LENGTH) / RATE
        phase = random.random() * 2 * np.pi
        clip = np.sin(2 * np.pi * TONES[self.labels[i]] * time + phase)
        clip += np.random.normal(scale=0.5, size=LENGTH)
        return torch.tensor(clip, dtype=torch.float32), int(self.labels[i])


class ToneNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 15)
        self.out = nn.Linear(16, len(TONES))

    def forward(self, clip):
        return self.out(self.conv(clip[:, None]).relu().amax(-1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()

    def init_worker(worker_id):
        random.seed(args.seed)
        np.random.seed(args.seed)

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    clips = Clips(320)
    sampler = DistributedSampler(clips)
    loader = DataLoader(
        clips,
        batch_size=32 // world,
        sampler=sampler,
        num_workers=args.workers,
        worker_init_fn=init_worker,
        persistent_workers=True,
    )
    model = DDP(ToneNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        right = torch.zeros(2, dtype=torch.long)
        for clip, tone in loader:
            scores = model(clip)
            loss = nn.functional.cross_entropy(scores, tone)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += torch.tensor([(scores.argmax(1) == tone).sum().item(), len(tone)])
        dist.all_reduce(right)
        if rank == 0:
            print(f"epoch {epoch}: {right[0].item()} of {right[1].item()} clips right while training")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
