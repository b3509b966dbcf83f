"""python lessons/21-collectives/lesson.py --nproc 4

The other collectives: broadcast, reduce_scatter, all_gather, and how they make an all_reduce. By
hand, in a ring: each rank sends 2 (n - 1) / n of the tensor, however many ranks there are."""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 5


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


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def start(worker, args):
    """Run worker(rank, args, store_file) in args.nproc processes; an error in one ends all."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (args, Path(folder, "store")), nprocs=args.nproc)


class Ring:
    """Sends to the next rank, receives from the one before, and counts the bytes that it sends."""

    def __init__(self):
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.sent = 0

    def pass_on(self, chunk):
        """Send a chunk to the next rank, and return the one that has come from the rank before."""
        received = torch.empty_like(chunk)
        request = dist.isend(chunk, (self.rank + 1) % self.ranks)
        dist.recv(received, (self.rank - 1) % self.ranks)
        request.wait()
        self.sent += chunk.nbytes
        return received

    def reduce_scatter(self, chunks):
        """Add the ranks' chunks; afterwards this rank's next chunk is whole."""
        for step in range(self.ranks - 1):
            received = self.pass_on(chunks[(self.rank - step) % self.ranks])
            chunks[(self.rank - step - 1) % self.ranks] += received

    def all_gather(self, chunks):
        """Pass the whole chunks round, until every rank has all of them."""
        for step in range(self.ranks - 1):
            received = self.pass_on(chunks[(self.rank - step + 1) % self.ranks])
            chunks[(self.rank - step) % self.ranks].copy_(received)

    def all_reduce(self, tensor):
        chunks = list(tensor.chunk(self.ranks))
        self.reduce_scatter(chunks)
        self.all_gather(chunks)


def check_meaning(rank, ranks, device):
    """Stop unless each collective does what its name says."""
    mine = torch.full((2,), rank + 1.0, device=device)
    from_rank_0 = mine.clone()
    dist.broadcast(from_rank_0, src=0)
    assert from_rank_0.tolist() == [1.0, 1.0]
    of_all = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(of_all, mine)
    assert [tensor[0].item() for tensor in of_all] == [number + 1.0 for number in range(ranks)]
    if rank == 0:
        print("broadcast: all have rank 0's numbers; all_gather: all have everybody's", flush=True)


def measure(collective, tensor):
    """Return the median seconds of a collective, from when all are ready until all are done."""
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = perf_counter()
        collective(tensor)
        dist.barrier()
        seconds.append(perf_counter() - begin)
    return median(seconds)


def worker(rank, args, store_file):
    device = join_group(rank, args.nproc, args.device, store_file)
    check_meaning(rank, args.nproc, device)

    torch.manual_seed(rank)
    size = args.megabytes * 1_000_000 // 4 // args.nproc * args.nproc  # equal chunks
    tensor = torch.randn(size, device=device)
    expected = tensor.clone()
    dist.all_reduce(expected)
    ring = Ring()
    ring.all_reduce(tensor)
    assert torch.allclose(tensor, expected, atol=1e-5), "the ring has another sum"
    share = 2 * (args.nproc - 1) / args.nproc
    assert ring.sent == share * tensor.nbytes, f"{ring.sent} bytes sent"

    collectives = {
        "broadcast": (lambda data: dist.broadcast(data, src=0), 1),
        "all_reduce": (dist.all_reduce, share),
        "all_reduce in our ring": (Ring().all_reduce, share),
    }
    for name, (collective, sent_share) in collectives.items():
        seconds = measure(collective, tensor)
        speed = sent_share * tensor.nbytes / seconds / 1e9
        if rank == 0:
            print(f"{name}: {1000 * seconds:.2f} ms, {speed:.3f} GB/s out of each rank", flush=True)
    if rank == 0:
        print(
            f"claim holds: each of {args.nproc} ranks sent {ring.sent / 1e6:.1f} MB to add"
            f" {tensor.nbytes / 1e6:.1f} MB: 2 (n - 1) / n of it"
        )
    leave_group()


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
    parser.add_argument("--megabytes", type=positive, default=4, help="of the tensor")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < args.nproc:
        gpus = torch.cuda.device_count()
        parser.error(f"--nproc {args.nproc} on {gpus} GPUs. HINT: --device cpu")
    return args


if __name__ == "__main__":
    start(worker, parse_args())
