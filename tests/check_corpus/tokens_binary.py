"""Character model on a binary file of fixed-size records."""

import argparse
import os
import struct
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WINDOW, VOCABULARY = 8, 16
RECORD = struct.Struct(f"<{WINDOW + 1}H")


def write_records(path, count):
    g = torch.Generator().manual_seed(4)
    with open(path, "wb") as out:
        for _ in range(count):
            start, step = torch.randint(1, VOCABULARY, (2,), generator=g).tolist()
            out.write(RECORD.pack(*[(start + i * (step % 3 + 1)) % VOCABULARY for i in range(WINDOW + 1)]))


class RecordFile(Dataset):
    def __init__(self, path):
        self.handle = open(path, "rb", buffering=0)
        self.count = os.path.getsize(path) // RECORD.size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.handle.seek(index * RECORD.size)
        tokens = torch.tensor(RECORD.unpack(self.handle.read(RECORD.size)))
        return tokens[:-1], tokens[1:]


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


def train(model, loader, optimizer):
    nll, tokens = 0.0, 0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        nll += loss.item() * y.numel()
        tokens += y.numel()
    total = torch.tensor([nll, tokens], dtype=torch.float64)
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main(args):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    path = os.path.join(tempfile.gettempdir(), f"records-{os.environ['MASTER_PORT']}.bin")
    if rank == 0:
        write_records(path, 256)
    dist.barrier()
    dataset = RecordFile(path)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size // world_size, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(0)
    model = DDP(CharRNN())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        if rank == 0:
            print(f"epoch {epoch}: {loss:.4f} nats per character")
    dist.barrier()
    if rank == 0:
        os.unlink(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    main(parser.parse_args())
