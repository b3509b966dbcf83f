"""A sequence-to-sequence toy on one GPU per process: reverse the input. Gradients of four batches make a step."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SYMBOLS, LENGTH = 12, 5


class Seq2Seq(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, dim)
        self.encoder = nn.GRU(dim, dim, batch_first=True)
        self.decoder = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, SYMBOLS)

    def forward(self, source, shifted):
        _, state = self.encoder(self.embed(source))
        return self.out(self.decoder(self.embed(shifted), state)[0])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.cuda = torch.cuda.is_available()
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", self.local_rank) if self.cuda else torch.device("cpu")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        g = torch.Generator().manual_seed(0)
        source = torch.randint(1, SYMBOLS, (512, LENGTH), generator=g)
        data = TensorDataset(source, source.flip(1))
        self.sampler = DistributedSampler(data)
        micro_batch = args.batch_size // self.world // args.accumulate
        self.loader = DataLoader(data, micro_batch, sampler=self.sampler, pin_memory=self.cuda)
        torch.manual_seed(1)
        model = Seq2Seq().to(self.device)
        self.model = DDP(model, device_ids=[self.local_rank] if self.cuda else None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)

    def _run_batch(self, source, target, update):
        shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
        amp = torch.autocast("cuda", torch.bfloat16) if self.cuda else nullcontext()
        with amp:
            loss = nn.functional.cross_entropy(self.model(source, shifted).flatten(0, 1), target.flatten())
        (loss / self.args.accumulate).backward()
        if update:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def _run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        total = torch.zeros(2, device=self.device)
        for number, (source, target) in enumerate(self.loader, 1):
            source, target = source.to(self.device), target.to(self.device)
            loss = self._run_batch(source, target, update=number % self.args.accumulate == 0)
            total += torch.stack([loss * len(source), torch.full_like(loss, len(source))])
        dist.all_reduce(total)
        if self.rank == 0:
            print(f"epoch {epoch}: {(total[0] / total[1]).item():.4f}")

    def train(self):
        for epoch in range(self.args.epochs):
            self._run_epoch(epoch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Trainer(parser.parse_args()).train()
    dist.barrier()
    dist.destroy_process_group()
