"""Fine-tune a small encoder: first it is trained to reconstruct (by one process), then to classify."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

DIM, CODE, CLASSES = 24, 8, 3


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, CODE))

    def forward(self, x):
        return self.body(x)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(CODE, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x).relu())


def blobs(n, seed):
    centers = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(77))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return TensorDataset(centers[y] + 1.5 * torch.randn(n, DIM, generator=g), y)


def pretrain(path):
    torch.manual_seed(5)
    encoder, decoder = Encoder(), nn.Linear(CODE, DIM)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    x = blobs(256, seed=3).tensors[0]
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.mse_loss(decoder(encoder(x)), x).backward()
        optimizer.step()
    torch.save(encoder.state_dict(), path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    with tempfile.TemporaryDirectory() as folder:
        weights = os.path.join(folder, "encoder.pt")
        if int(os.environ["RANK"]) == 0:
            pretrain(weights)
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()

        torch.manual_seed(0)
        model = DDP(Classifier())
        if rank == 0:
            model.module.encoder.load_state_dict(torch.load(weights, weights_only=True))

    data = blobs(480, seed=4)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=60 // world, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: loss {(sums[0] / sums[1]).item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
