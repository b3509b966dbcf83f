"""torchrun --nproc-per-node 2 loader_ddp.py: ddp_before.py, which now resumes on any number of processes."""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain import load_data, make_model, num_correct
from stepladder import Loader, StopSignals
from torch.nn.parallel import DistributedDataParallel

CHECKPOINT = Path("loader_ddp.pt")


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def save(model, optimizer, loader):
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    new = CHECKPOINT.with_suffix(".new")
    torch.save({**state, "loader": loader.state_dict()}, new)
    new.replace(CHECKPOINT)  # a kill leaves the old file or the new one


def load(model, optimizer, loader):
    state = torch.load(CHECKPOINT)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])


def main(config, stop):
    dist.init_process_group()
    model = DistributedDataParallel(make_model(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, test_data = load_data()
    loader = Loader(train_data, config.global_batch, config.seed, run_dir="runs/loader_ddp")
    if CHECKPOINT.exists():
        load(model, optimizer, loader)
    for _ in range(loader.epoch, config.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="sum") / loader.step_samples
            optimizer.zero_grad()
            (loss * dist.get_world_size()).backward()  # DistributedDataParallel averages
            optimizer.step()
            dist.all_reduce(mean := loss.detach())
            is_stopping = stop.agreed()
            if dist.get_rank() == 0:
                print(f"step {loader.step}, loss {mean.item():.7f}", flush=True)
                if is_stopping or loader.step % 10 == 0:
                    save(model, optimizer, loader)
            if is_stopping:
                dist.barrier()  # until it is saved: Slurm may end all processes with the first
                sys.exit(75)
    if dist.get_rank() == 0:
        with torch.no_grad():
            correct = num_correct(model.module, test_data[:])
        print(f"accuracy {correct / len(test_data):.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with StopSignals() as stop:
        main(flags(), stop)
