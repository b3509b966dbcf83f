"""python lessons/01-all-reduce/lesson.py --nproc 4

Four processes each hold a number; after one all_reduce each of them holds the sum. With `--device
cuda` the numbers are on GPUs, one per process."""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def join_group(rank, nproc, device, store_file):
    """Join the other processes and return this process's device.

    They find each other through a file, because any port could be in use.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    store = f"file://{store_file}"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=nproc)
    return torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")


def start(worker, args):
    """Run worker(rank, args, store_file) in args.nproc processes; an error in one ends all."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, Path(folder, "store")), nprocs=args.nproc)


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    number = torch.tensor(rank + 1.0, device=device)
    print(f"rank {rank} of {args.nproc} on {device}: before {number.item():.0f}", flush=True)
    # Waits until all ranks have called it. Then the tensor holds the sum, on all of them.
    dist.all_reduce(number)
    print(f"rank {rank} of {args.nproc} on {device}: after {number.item():.0f}", flush=True)

    expected = args.nproc * (args.nproc + 1) / 2
    assert number.item() == expected, f"rank {rank} holds {number.item()}, not {expected}"
    dist.barrier()
    if rank == 0:
        print(f"claim holds: 1 + ... + {args.nproc} = {expected:.0f} on every rank")
    dist.barrier()  # with gloo, a rank whose peers have gone may abort at its end
    dist.destroy_process_group()


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=positive, default=4, help="processes")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    return args


if __name__ == "__main__":
    start(worker, parse_args())
