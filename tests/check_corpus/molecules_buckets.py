"""A batch sampler of its own: sequences of like length go together, every rank makes the same number of batches."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Molecules(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(0)
        self.chains = [torch.randint(1, 9, (int(k),), generator=g) for k in torch.randint(3, 20, (n,), generator=g)]

    def __len__(self):
        return len(self.chains)

    def __getitem__(self, i):
        chain = self.chains[i]
        return chain, (chain == 3).sum() / len(chain) + (chain == 5).float().mean()


class BucketSampler(Sampler):
    def __init__(self, lengths, batch_size, rank, world, seed=0):
        self.lengths, self.batch_size = torch.tensor(lengths), batch_size
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return -(-len(self.lengths) // (self.batch_size * self.world))

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        jitter = torch.rand(len(self.lengths), generator=g)
        order = (self.lengths + jitter).argsort()
        order = torch.cat([order, order[: -len(order) % (self.batch_size * self.world)]])
        rounds = order.view(-1, self.world, self.batch_size)
        for number in torch.randperm(len(rounds), generator=g):
            yield rounds[number, self.rank].tolist()


def collate(items):
    chains, targets = zip(*items)
    return nn.utils.rnn.pad_sequence(chains, batch_first=True), torch.stack(targets)[:, None]


class MoleculeNet(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(9, dim, padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, chains):
        lengths = (chains > 0).sum(1, keepdim=True)
        return self.mlp(self.embed(chains).sum(1) / lengths)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Molecules(500)
    lengths = [len(chain) for chain in data.chains]
    sampler = BucketSampler(lengths, args.batch_size // world, rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    model = DDP(MoleculeNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for chains, target in loader:
            loss = nn.functional.mse_loss(model(chains), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(target), len(target)])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: mse {(sums[0] / sums[1]).item():.5f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-2)
    main(parser.parse_args())
