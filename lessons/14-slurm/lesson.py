"""stepladder lab exec -- srun --nodes 2 --ntasks-per-node 2 python lessons/14-slurm/lesson.py

Slurm starts the ranks: srun makes one task per rank, and its variables say who each is. Under
torchrun the lesson works as before, so job_torchrun.sbatch starts one torchrun per node instead.
"""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NOISE = 0.1  # standard deviation of what no model can predict: the loss can fall to its square


def make_data():
    """Return 2048 samples: x of 20 numbers, y = teacher(x) + noise."""
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(2048, 20, generator=generator)
    directions = torch.randn(20, 2, generator=generator) / 20**0.5
    y = (x @ directions).tanh().sum(1, keepdim=True)
    return TensorDataset(x, y + NOISE * torch.randn(2048, 1, generator=generator))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))


def set_rank_from_slurm():
    """Set torchrun's variables from those of a Slurm step that has a task per rank."""
    env = os.environ
    if "RANK" in env:
        return  # torchrun has set them; then the task of Slurm is torchrun, not this rank
    if "SLURM_PROCID" not in env or int(env.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
        return  # in a batch script outside of srun: this process is none of the job's tasks
    command = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
    hosts = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["GROUP_RANK"] = env["SLURM_NODEID"]
    env["GROUP_WORLD_SIZE"] = env["SLURM_STEP_NUM_NODES"]
    env.setdefault("MASTER_ADDR", hosts[0])
    # A port per job, below the ports that the system assigns itself.
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 12000))


def join_group(device):
    """Join the ranks that torchrun or Slurm has started, and return this rank's device."""
    set_rank_from_slurm()
    if "RANK" not in os.environ:
        sys.exit(f"error: no RANK in the environment. HINT: {__doc__.splitlines()[0]}")
    torch.set_num_threads(1)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    # It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")


def leave_group():
    """End this process once all ranks have called this. Nothing after the call runs."""
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # Python's own exit may abort while gloo's threads still run


def train_epoch(model, optimizer, loader, device):
    for step, (x, y) in enumerate(loader):
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            check_equal([p.grad for p in model.parameters()], "gradients before step()")
        optimizer.step()


def check_equal(tensors, name):
    """Stop if these tensors are not the same, to the bit, on every rank."""
    values = torch.cat([tensor.detach().flatten() for tensor in tensors])
    values_of_rank_0 = values.clone()
    dist.broadcast(values_of_rank_0, src=0)
    is_equal = torch.equal(values, values_of_rank_0)
    assert is_equal, f"rank {dist.get_rank()} has other {name} than rank 0"


@torch.no_grad()
def loss_on(data, model, device):
    """Return the mean loss on all samples."""
    x, y = data.tensors
    return F.mse_loss(model(x.to(device)), y.to(device)).item()


def settings_of(args):
    """Return the settings that must be the same when a run is resumed."""
    names = ("total_epochs", "batch_size", "lr")
    return {name: getattr(args, name) for name in names} | {"ranks": dist.get_world_size()}


def save_snapshot(folder, model, optimizer, next_epoch, args):
    """Write a temporary file and rename it, so that a power cut leaves a complete snapshot."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),  # without it momentum starts cold
        "next_epoch": next_epoch,  # not the one just finished: that would be trained twice
        "settings": settings_of(args),
    }
    torch.save(snapshot, folder / "snapshot.tmp")
    (folder / "snapshot.tmp").replace(folder / "snapshot.pt")


def load_snapshot(folder, model, optimizer, args, device):
    """Return the epoch to continue with: 0 without a snapshot, or if its run was finished."""
    if not (folder / "snapshot.pt").exists():
        return 0
    snapshot = torch.load(folder / "snapshot.pt", map_location=device, weights_only=True)
    settings = snapshot["settings"]
    if snapshot["next_epoch"] == settings["total_epochs"]:
        return 0
    if settings != settings_of(args):
        problem = f"{folder} holds a run with {settings}, not {settings_of(args)}"
        sys.exit(f"error: {problem}. HINT: --folder {folder}-2")
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_epoch"]


def positive(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "numbers", nargs="*", type=positive, metavar="50 10", help="total epochs, save every"
    )
    parser.add_argument("--total_epochs", type=positive, default=50)
    parser.add_argument("--save_every", type=positive, default=10, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=32, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    folder = Path("runs/lessons", Path(__file__).parent.name)
    parser.add_argument("--folder", type=Path, default=folder)
    args = parser.parse_args()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and torch.cuda.device_count() < local_ranks:
        parser.error(f"--device cuda, but {torch.cuda.device_count()} GPUs. HINT: --device cpu")
    if len(args.numbers) > 2:
        parser.error(f"{args.numbers} are more than two numbers. HINT: 50 10")
    if len(args.numbers) > 0:
        args.total_epochs = args.numbers[0]
    if len(args.numbers) > 1:
        args.save_every = args.numbers[1]
    return args


def train(args, folder, device, until):
    """Train up to epoch `until`, from a snapshot in `folder` if there is one; return the model."""
    rank = dist.get_rank()
    data = make_data()
    # Without the flag DDP changes its buckets after the first step, so a resumed run would add
    # the gradients in another order.
    model = DistributedDataParallel(make_model().to(device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    assert len(loader) == steps_per_epoch(len(data), dist.get_world_size(), args.batch_size)
    first_epoch = load_snapshot(folder, model, optimizer, args, device)
    if first_epoch and rank == 0:
        print(f"       from the snapshot in {folder}: epoch {first_epoch} is next", flush=True)
    wrote = False
    for epoch in range(first_epoch, until):
        sampler.set_epoch(epoch)  # the order depends only on the epoch, also in a resumed run
        train_epoch(model, optimizer, loader, device)
        print(line(rank, epoch, args.batch_size, len(loader)), flush=True)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == until):
            save_snapshot(folder, model, optimizer, epoch + 1, args)
            wrote = True
    dist.barrier()  # no rank reads the snapshot before rank 0 has written it
    check_equal(model.parameters(), "weights")
    check_one_writer(wrote)
    return model


def check_one_writer(wrote):
    """Stop unless rank 0 alone has written the snapshot. wrote: whether this rank has."""
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, wrote)
    writers = [rank for rank, answer in enumerate(answers) if answer]
    assert writers == [0], f"the snapshot was written by ranks {writers}"


def steps_per_epoch(samples, ranks, batch_size):
    """Compute the steps of a rank: all ranks get as many samples, the last batch may be smaller."""
    samples_per_rank = math.ceil(samples / ranks)
    return math.ceil(samples_per_rank / batch_size)


def line(rank, epoch, batch_size, steps):
    return f"[GPU{rank}] Epoch {epoch} | Batchsize: {batch_size} | Steps: {steps}"


@record
def main():
    args = parse_args()
    device = join_group(args.device)
    model = train(args, args.folder, device, args.total_epochs)
    nodes = int(os.environ["GROUP_WORLD_SIZE"])
    ranks = dist.get_world_size()
    steps = steps_per_epoch(len(make_data()), ranks, args.batch_size)
    loss = loss_on(make_data(), model, device)
    assert loss < 0.5, f"the loss is {loss:.4f}"
    if dist.get_rank() == 0:
        print(
            f"claim holds: {ranks} ranks on {nodes} nodes, {steps} steps each, one writer;"
            f" loss {loss:.4f}"
        )
    leave_group()


if __name__ == "__main__":
    main()
