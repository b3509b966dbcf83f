"""torchrun --nproc-per-node 2 loader_accelerate.py: accelerate_before.py, resumable on any number of processes."""

import argparse
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from plain import load_data, make_model
from stepladder import Loader, StopSignals

CHECKPOINT = Path("loader_accelerate")


def flags():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def save(accelerator):
    new = CHECKPOINT.with_suffix(".new")
    accelerator.save_state(new)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        new.replace(CHECKPOINT)


def main(config, stop):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(config.seed)
    model = make_model(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    train_data, _ = load_data()
    loader = Loader(
        train_data,
        config.global_batch,
        config.seed,
        device=accelerator.device,
        run_dir="runs/loader_accelerate",
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(loader)
    if CHECKPOINT.exists():
        accelerator.load_state(CHECKPOINT)
    for _ in range(loader.epoch, config.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y, reduction="sum") / loader.step_samples
            optimizer.zero_grad()
            accelerator.backward(loss * accelerator.num_processes)
            optimizer.step()
            accelerator.print(
                f"step {loader.step}, loss {accelerator.reduce(loss.detach()).item():.7f}"
            )
            is_stopping = stop.agreed()
            if is_stopping or loader.step % 10 == 0:
                save(accelerator)
            if is_stopping:
                accelerator.wait_for_everyone()  # Slurm may end all processes with the first
                sys.exit(75)
    accelerator.end_training()


if __name__ == "__main__":
    with StopSignals() as stop:
        main(flags(), stop)
