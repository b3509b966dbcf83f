"""torchrun --standalone --nproc_per_node=2 lessons/24-preempted/lesson.py 10 5

A cluster takes its nodes back: it sends SIGTERM, and a while later SIGKILL. Each rank gets the
signal in another step, so all ranks agree on the step after which they save and stop. The run goes
on within the epoch, and ends as if nobody had interrupted it."""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
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


def join_group(device):
    """Join the ranks that torchrun has started, and return this rank's device."""
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


class Signal:
    """Notes SIGTERM, which then ends nothing by itself."""

    def __init__(self):
        self.came_in_step = None
        self.step = 0
        signal.signal(signal.SIGTERM, self.note)

    def note(self, number, frame):
        self.came_in_step = self.step

    def agreed(self, device):
        """Return whether any rank has got the signal. All ranks call it, and get one answer."""
        came = torch.tensor(float(self.came_in_step is not None), device=device)
        dist.all_reduce(came, dist.ReduceOp.MAX)
        return bool(came)


def play_the_cluster(step):
    """Send this rank SIGTERM: rank 0 in step 40, rank 1 in step 43, and so on."""
    if step == 40 + 3 * dist.get_rank():
        os.kill(os.getpid(), signal.SIGTERM)


def train_epoch(model, optimizer, loader, device, epoch, first_step, stop):
    """Train an epoch from step `first_step`, and return the step that is next.

    Args:
        stop: A Signal, which may end the epoch early; None for a run that nobody interrupts.
    """
    for step, (x, y) in enumerate(loader):
        if step < first_step:
            continue  # trained before the stop
        loss = F.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if stop:
            stop.step = epoch * len(loader) + step + 1
            play_the_cluster(stop.step)
            if stop.agreed(device):
                return step + 1
    return len(loader)


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


def save_snapshot(folder, model, optimizer, next_epoch, next_step, args):
    """Write a temporary file and rename it, so that a power cut leaves a complete snapshot."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),  # without it momentum starts cold
        "next_epoch": next_epoch,  # not the one just finished: that would be trained twice
        "next_step": next_step,  # within that epoch
        "settings": settings_of(args),
    }
    torch.save(snapshot, folder / "snapshot.tmp")
    (folder / "snapshot.tmp").replace(folder / "snapshot.pt")


def load_snapshot(folder, model, optimizer, args, device):
    """Return the epoch and the step to continue with; 0, 0 without an unfinished run's snapshot."""
    if not (folder / "snapshot.pt").exists():
        return 0, 0
    snapshot = torch.load(folder / "snapshot.pt", map_location=device, weights_only=True)
    settings = snapshot["settings"]
    if snapshot["next_epoch"] == settings["total_epochs"]:
        return 0, 0
    if settings != settings_of(args):
        problem = f"{folder} holds a run with {settings}, not {settings_of(args)}"
        sys.exit(f"error: {problem}. HINT: --folder {folder}-2")
    model.module.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    return snapshot["next_epoch"], snapshot["next_step"]


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
        "numbers", nargs="*", type=positive, metavar="10 5", help="total epochs, save every"
    )
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
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
        parser.error(f"{args.numbers} are more than two numbers. HINT: 10 5")
    if len(args.numbers) > 0:
        args.total_epochs = args.numbers[0]
    if len(args.numbers) > 1:
        args.save_every = args.numbers[1]
    return args


def train(args, folder, device, stop=None):
    """Train, from the snapshot in `folder` if any, up to the end or a stop; return the model.

    It also returns how many steps the whole run has done.
    """
    rank = dist.get_rank()
    data = make_data()
    # Without the flag DDP changes its buckets after the first step, so a resumed run would add
    # the gradients in another order.
    model = DistributedDataParallel(make_model().to(device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    epoch, step = load_snapshot(folder, model, optimizer, args, device)
    if (epoch or step) and rank == 0:
        print(f"       from the snapshot in {folder}: epoch {epoch}, step {step}", flush=True)
    is_over = False
    while epoch < args.total_epochs and not is_over:
        sampler.set_epoch(epoch)  # the order depends only on the epoch, also in a resumed run
        step = train_epoch(model, optimizer, loader, device, epoch, step, stop)
        is_over = step < len(loader)
        if not is_over:
            epoch, step = epoch + 1, 0
        if rank == 0 and (is_over or epoch % args.save_every == 0 or epoch == args.total_epochs):
            save_snapshot(folder, model, optimizer, epoch, step, args)
    dist.barrier()  # Slurm may end all ranks with the first one: nobody exits before it is saved
    check_equal(model.parameters(), "weights")
    return model, epoch * len(loader) + step


def train_unbroken(args, device):
    """Run the same training without a stop, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:  # each rank makes one; rank 0's is used
        return train(args, Path(folder), device)


def same_bits(model_a, model_b):
    pairs = zip(model_a.parameters(), model_b.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main():
    args = parse_args()
    device = join_group(args.device)
    stop = Signal()
    _, stopped_after = train(args, args.folder, device, stop)
    came = f"SIGTERM in step {stop.came_in_step}" if stop.came_in_step else "no signal yet"
    print(f"[GPU{dist.get_rank()}] {came}, stopped after step {stopped_after}", flush=True)
    # Here a job exits with the code by which it is queued again, and all ranks start anew. In
    # this process everything is made anew, so the run goes on with what the snapshot has.
    model, steps = train(args, args.folder, device)
    unbroken, _ = train_unbroken(args, device)
    loss = loss_on(make_data(), model, device)
    assert stopped_after < steps, "nobody was interrupted"
    assert same_bits(model, unbroken), "the interrupted run ended with other weights"
    assert loss < 0.5, f"the loss is {loss:.4f}"
    dist.barrier()
    if dist.get_rank() == 0:
        share = f"after step {stopped_after} of {steps}"
        print(
            f"claim holds: all stopped {share}, no step was lost or repeated, the bits are the same"
        )
    leave_group()


if __name__ == "__main__":
    main()
