"""The functions that a converted script gets, which import torch and the standard library alone."""

from __future__ import annotations

from typing import NamedTuple

DIST = "import torch.distributed as dist"


class _Helper(NamedTuple):
    """A function of a converted script.

    Args:
        text: Its definition; empty for a class of torch.
        imports: The lines that it needs.
    """

    text: str
    imports: tuple[str, ...]


HELPERS = {
    "DistributedDataParallel": _Helper(
        "", ("import torch", DIST, "from torch.nn.parallel import DistributedDataParallel")
    ),
    "join_processes": _Helper(
        '''\
def join_processes():
    """Join the processes that torchrun has started; without it, this one is the only one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))''',
        ("import os", "import torch", DIST),
    ),
    "share_samples": _Helper(
        '''\
def share_samples(loader):
    """Return a loader of this process's share of each batch."""
    if loader.batch_size % dist.get_world_size():
        raise ValueError(f"a batch of {loader.batch_size} has no equal shares")
    shuffle = isinstance(loader.sampler, RandomSampler)
    sampler = DistributedSampler(loader.dataset, shuffle=shuffle, drop_last=loader.drop_last)
    return DataLoader(
        loader.dataset, loader.batch_size // dist.get_world_size(), sampler=sampler,
        num_workers=loader.num_workers, collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory, drop_last=loader.drop_last,
    )''',
        (DIST, "from torch.utils.data import DataLoader, DistributedSampler, RandomSampler"),
    ),
    "share_batches": _Helper(
        '''\
def share_batches(loader):
    """Return a loader of this process's batches: each sample is evaluated by one process."""
    samples = range(len(loader.dataset))
    batches = list(BatchSampler(samples, loader.batch_size, loader.drop_last))
    return DataLoader(
        loader.dataset, batch_sampler=batches[dist.get_rank() :: dist.get_world_size()],
        num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
    )''',
        (DIST, "from torch.utils.data import BatchSampler, DataLoader"),
    ),
    "sum_over_processes": _Helper(
        '''\
def sum_over_processes(value):
    """Return the sum of a number or a tensor over all processes; lists are joined."""
    value = value.cpu() if torch.is_tensor(value) else value
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return sum(parts[1:], parts[0])''',
        ("import torch", DIST),
    ),
    "mean_over_processes": _Helper(
        '''\
def mean_over_processes(value):
    """Return the mean of a number over all processes."""
    return sum_over_processes(value) / dist.get_world_size()''',
        (DIST,),
    ),
    "print_once": _Helper(
        '''\
def print_once(*args, **kwargs):
    """Print from one process alone; all compute what is printed."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*args, **kwargs)''',
        (DIST,),
    ),
    "save_once": _Helper(
        '''\
def save_once(value, path):
    """Save from one process alone; the file is there whole or not at all."""
    if dist.get_rank() == 0:
        torch.save(value, f"{path}.part")
        os.replace(f"{path}.part", path)''',
        ("import os", "import torch", DIST),
    ),
    "save_snapshot": _Helper(
        '''\
def save_snapshot(path, parts, **values):
    """Save all that the training goes on with: parts, values, and random numbers."""
    random = [None] * dist.get_world_size()
    dist.all_gather_object(random, torch.get_rng_state())
    states = {name: part.state_dict() for name, part in parts.items()}
    save_once({**values, "parts": states, "random": random}, path)''',
        (DIST,),
    ),
    "load_snapshot": _Helper(
        '''\
def load_snapshot(path, parts):
    """Load a snapshot, if there is one, into the parts; return its values."""
    if not os.path.exists(path):
        return {}
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(snapshot["parts"][name])
    if dist.get_rank() < len(snapshot["random"]):
        torch.set_rng_state(snapshot["random"][dist.get_rank()])
    return snapshot''',
        ("import os", "import torch", DIST),
    ),
    "watch_for_stop": _Helper(
        '''\
stop_signals = []


def watch_for_stop():
    """Remember a signal that asks to stop."""
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))''',
        ("import signal",),
    ),
    "exit_if_asked": _Helper(
        '''\
def exit_if_asked():
    """End all processes if one was asked to stop; 75 asks for a new start."""
    if sum_over_processes(len(stop_signals)):
        sys.exit(75)''',
        ("import sys",),
    ),
}
