"""Language model trained for a number of steps, with a snapshot every few steps."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VOCABULARY, CONTEXT = 24, 8


class Phrases(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        first, step = torch.randint(1, VOCABULARY, (2,), generator=g).tolist()
        tokens = torch.tensor([(first + (step % 5) * k) % VOCABULARY for k in range(CONTEXT + 1)])
        return tokens[:-1], tokens[1:]


class LanguageModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, VOCABULARY)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


def save(path, net, optimizer, step, epoch):
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch, "rng": rng}
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = LanguageModel()
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    step = epoch = 0
    if os.path.exists(args.snapshot):
        state = torch.load(args.snapshot, map_location="cpu", weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        step, epoch = state["step"], state["epoch"]
        torch.set_rng_state(state["rng"][rank])
    model = DDP(net)

    data = Phrases()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world, sampler=sampler)
    while step < args.steps:
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
            step += 1
            if step % args.save_every == 0:
                save(args.snapshot, net, optimizer, step, epoch)
            if step == args.steps:
                break
        epoch += 1
    if rank == 0:
        print(f"{step} steps done, {epoch} epochs begun")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--snapshot", default="phrases.pt")
    main(parser.parse_args())
