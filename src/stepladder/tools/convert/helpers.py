"""The functions that a converted script gets, which import torch and the standard library alone."""

from __future__ import annotations

# What the name of each stands for.
IMPORTS = {
    "json": "import json",
    "logging": "import logging",
    "os": "import os",
    "random": "import random",
    "signal": "import signal",
    "sys": "import sys",
    "tempfile": "import tempfile",
    "time": "import time",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "contextmanager": "from contextlib import contextmanager",
    "accumulate": "from itertools import accumulate",
    "chain": "from itertools import chain",
    "islice": "from itertools import islice",
    "zip_longest": "from itertools import zip_longest",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
    "allreduce_hook": (
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook"
    ),
    "DataLoader": "from torch.utils.data import DataLoader",
    "SequentialSampler": "from torch.utils.data import SequentialSampler",
    "StopSignals": "from stepladder import StopSignals",
}

HELPERS = {
    "join_processes": '''\
def join_processes():
    """Join the processes that torchrun has started; without it, this one is the only one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    states = [random_states()]
    dist.broadcast_object_list(states)
    set_random_states(states[0])  # from here on all processes draw what process 0 draws''',
    "leave_processes": '''\
def leave_processes():
    """Leave the other processes. Where the interpreter ends before gloo's threads, it aborts."""
    time.sleep(0.1)  # lets them drop their tensors
    dist.destroy_process_group()''',
    "started_accelerator": '''\
def started_accelerator():
    """Return the accelerator that the started script has made."""
    return sys.modules["__main__"].accelerator''',
    "random_states": '''\
def random_states():
    """Return the states of all random generators: torch's, Python's and NumPy's."""
    states = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *others = sys.modules["numpy"].random.get_state()
        states["numpy"] = name, keys.tolist(), *others
    return states''',
    "set_random_states": '''\
def set_random_states(states):
    """Let all random generators go on from these states."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states["numpy"])''',
    "ShareOfSampler": '''\
class ShareOfSampler:
    """What this process takes of a sampler: process 0 draws for all."""

    def __init__(self, sampler, batch_size=1, drop_last=False):
        self.sampler = sampler
        self.batch_size = batch_size  # of all processes; 1 where some may have fewer batches
        self.drop_last = drop_last

    def __iter__(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        draws = iter(self.sampler)
        DataLoader.given = []  # the sizes of batches in the last pass, of all modules
        most = 100 * size * self.batch_size
        has_more = True
        while has_more:
            drawn = [list(islice(draws, most))]
            dist.broadcast_object_list(drawn)
            has_more = len(drawn[0]) == most
            for item in drawn[0][rank : self.dealt(len(drawn[0])) : size]:
                DataLoader.given.append(len(item) if isinstance(item, list) else 1)
                yield item

    def __len__(self):
        dealt = self.dealt(len(self.sampler))
        return len(range(dist.get_rank(), dealt, dist.get_world_size()))

    def dealt(self, number):
        """Return how many of some samples are dealt: the last batch may be dropped."""
        rest = number % self.batch_size
        if rest and self.drop_last:
            return number - rest
        require_share(rest)
        return number''',
    "require_share": '''\
def require_share(rows):
    """End a start in which some processes would have no sample of a last batch."""
    processes = dist.get_world_size()
    if 0 < rows < processes:
        text = f"a last batch of {rows} has no sample for each of {processes} processes"
        sys.exit(1 if dist.get_rank() else f"{text}. HINT: drop_last=True, or another batch")''',
    "copy_loader": '''\
def copy_loader(loader, **changes):
    """Return a loader like another one, of other batches."""
    names = (
        "dataset", "num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator",
        "persistent_workers",
    )
    return DataLoader(**{name: getattr(loader, name) for name in names}, **changes)''',
    "share_of_batch": '''\
def share_of_batch(size):
    """Return how many samples of a batch this process takes."""
    processes = dist.get_world_size()
    if size % processes:
        text = f"a batch of {size} has no equal shares for {processes} processes"
        sys.exit(1 if dist.get_rank() else f"{text}. HINT: start a number that divides it")
    return size // processes''',
    "share_samples": '''\
def share_samples(loader):
    """Return a loader of this process's share of each batch."""
    return copy_loader(
        loader, batch_size=share_of_batch(loader.batch_size), drop_last=loader.drop_last,
        sampler=ShareOfSampler(loader.sampler, loader.batch_size, loader.drop_last),
    )''',
    "share_batches": '''\
def share_batches(loader):
    """Return a loader of this process's batches: each sample is evaluated by one process."""
    return copy_loader(loader, batch_sampler=ShareOfSampler(loader.batch_sampler))''',
    "share_rows": '''\
def share_rows(*values):
    """Return this process's rows of the parts of a batch, which process 0 gives to all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shares = [[rows_of(value, number, size) for value in values] for number in range(size)]
    dist.broadcast_object_list(shares)
    rows = [to_device_of(value, share) for value, share in zip(values, shares[rank])]
    return rows if len(rows) > 1 else rows[0]''',
    "rows_of": '''\
def rows_of(value, number, size):
    """Return each n-th row."""
    if isinstance(value, dict):
        return {name: rows_of(part, number, size) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and hasattr(value[0], "shape"):
        return [rows_of(part, number, size) for part in value]
    if not hasattr(rows_of, "share"):  # of the first batch: a last one may be smaller
        rows_of.share = share_of_batch(len(value))
    require_share(len(value))
    rows = [*range(number, len(value), size)]
    if torch.is_tensor(value):
        return value[rows].detach().cpu()
    return [value[row] for row in rows] if isinstance(value, list) else value[rows]''',
    "to_device_of": '''\
def to_device_of(value, share):
    """Return a share of a batch where this process has its own batch."""
    if isinstance(value, dict):
        return {name: to_device_of(part, share[name]) for name, part in value.items()}
    if isinstance(value, (list, tuple)) and hasattr(value[0], "shape"):
        return [to_device_of(*parts) for parts in zip(value, share)]
    if torch.is_tensor(value):
        return share.to(value.device).requires_grad_(value.requires_grad)
    return share''',
    "share_samples_if": '''\
def share_samples_if(is_training, loader):
    """Return a loader of this process's share of each batch, if it is for training."""
    return share_samples(loader) if is_training else loader''',
    "share_batches_if": '''\
def share_batches_if(is_evaluation, loader):
    """Return a loader of this process's batches, if it is for an evaluation."""
    return share_batches(loader) if is_evaluation else loader''',
    "share_shuffled": '''\
def share_shuffled(loader):
    """Return a loader of this process's share of each batch, if the loader shuffles."""
    is_ordered = isinstance(loader.sampler, SequentialSampler)
    return loader if is_ordered else share_samples(loader)''',
    "share_ordered": '''\
def share_ordered(loader):
    """Return a loader of this process's batches, if the loader does not shuffle."""
    is_ordered = isinstance(loader.sampler, SequentialSampler)
    return share_batches(loader) if is_ordered else loader''',
    "gather_objects": '''\
def gather_objects(value):
    """Return what all processes have, in the order of processes."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values''',
    "sum_over_processes": '''\
def sum_over_processes(value):
    """Return the sum of a number or a tensor over all processes; a list has all in their order."""
    if isinstance(value, tuple):
        return tuple(map(sum_over_processes, value))
    value = value.detach().cpu() if torch.is_tensor(value) else value
    parts = gather_objects(value)
    if isinstance(value, list):
        return list(chain.from_iterable(in_order(parts)))
    return sum(parts[1:], parts[0])''',
    "sum_items_over_processes": '''\
def sum_items_over_processes(value):
    """Return a list, a dict or an array of the sums of its items over all processes."""
    parts = gather_objects(value)
    if isinstance(value, dict):
        return {key: sum(part.get(key, 0) for part in parts) for key in chain(*parts)}
    return list(map(sum, zip(*parts))) if isinstance(value, list) else sum(parts[1:], parts[0])''',
    "join_over_processes": '''\
def join_over_processes(value):
    """Return the rows of all processes, in the order of the batches; None where none has any."""
    parts = gather_objects(value.cpu() if torch.is_tensor(value) else value)
    parts = in_order(parts)
    if not parts:
        return None
    join = torch.cat if torch.is_tensor(parts[0]) else sys.modules["numpy"].concatenate
    return join(parts)''',
    "in_order": '''\
def in_order(parts):
    """Return parts of all processes in the order of the batches in which processes took turns.

    A part has an item for each sample or batch; other parts follow each other as they are.
    """
    chunks = []
    sizes_of_batches = gather_objects(getattr(DataLoader, "given", []))
    for part, sizes in zip(parts, sizes_of_batches):
        part = [] if part is None else part
        sizes = sizes if len(part) == sum(sizes) else [1] * len(part) * (len(part) == len(sizes))
        ends = list(accumulate(sizes)) or [len(part)]
        chunks.append([part[start:end] for start, end in zip([0, *ends], ends)])
    in_turn = chain.from_iterable(zip_longest(*chunks))
    return [chunk for chunk in in_turn if chunk is not None and len(chunk)]''',
    "mean_over_processes": '''\
def mean_over_processes(value):
    """Return the mean of a number over all processes."""
    if isinstance(value, tuple):
        return tuple(map(mean_over_processes, value))
    return sum_over_processes(value) / dist.get_world_size()''',
    "mean_in_training": '''\
def mean_in_training(value):
    """Return the mean of a number over all processes, where gradients are computed."""
    return mean_over_processes(value) if torch.is_grad_enabled() else value''',
    "mean_by_batches": '''\
def mean_by_batches(value):
    """Return the mean over all batches of the last pass, from the mean of this process's."""
    if isinstance(value, tuple):
        return tuple(map(mean_by_batches, value))
    given = len(DataLoader.given)
    return sum_over_processes(value * given) / sum_over_processes(given)''',
    "weigh_share": '''\
def weigh_share(criterion, outputs, targets, shows_share=False, **options):
    """Return a loss whose gradient, averaged over all processes, is that of the whole batch.

    A share counts by the weights of its targets. The value is to be averaged, too, or
    shows the mean of the share.
    """
    loss = criterion(outputs, targets, **options)
    if not torch.is_grad_enabled():
        return loss
    weights = options.get("weight", getattr(criterion, "weight", None))
    ignored = options.get("ignore_index", getattr(criterion, "ignore_index", -100))
    kept = targets[targets != ignored]
    weight = torch.ones_like(kept, dtype=loss.dtype) if weights is None else weights[kept]
    weight = weight.sum()
    total = weight.clone()
    dist.all_reduce(total)
    if not len(kept):
        loss = 0 * outputs.sum()
    weighed = loss * weight * dist.get_world_size() / total
    return weighed + (loss - weighed).detach() if shows_share else weighed''',
    "weigh_by_rows": '''\
def weigh_by_rows(model):
    """Let the gradient of a share count by its rows: shares of a smaller batch may be unequal."""
    rows, weights = [1], []

    def count(module, args, kwargs):
        inputs = [value for value in [*args, *kwargs.values()] if torch.is_tensor(value)]
        rows[:], weights[:] = [len(inputs[0]) if inputs else 1], []

    def average(_, bucket):
        gradient = bucket.buffer()
        if not weights:  # all processes have their first bucket
            total = torch.tensor(float(rows[0]), device=gradient.device)
            dist.all_reduce(total)
            weights.append(rows[0] * dist.get_world_size() / total)
        gradient *= weights[0]
        return allreduce_hook(None, bucket)

    model.register_forward_pre_hook(count, with_kwargs=True)
    if hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, average)''',
    "gather_tensors": '''\
def gather_tensors(tensor):
    """Return the tensors of all processes, which have one shape."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts''',
    "gather_rows": '''\
def gather_rows(value):
    """Return the rows of all processes in the order of the batch; all compute the same loss.

    The gradient of this process's rows counts as often as there are processes, whose mean is taken.
    """
    if isinstance(value, dict):
        return {name: gather_rows(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [gather_rows(part) for part in value]
    if not torch.is_tensor(value) or not value.dim() or not torch.is_grad_enabled():
        return value
    constant = value.detach().contiguous()
    counts, shapes = zip(*gather_objects((len(constant), tuple(constant.shape[1:]))))
    if len(set(shapes)) > 1:
        sys.exit(f"outputs of a batch have the shapes {shapes}: pad all batches to one length")
    padding = constant[:1].expand(max(counts) - len(constant), *shapes[0])
    parts = gather_tensors(torch.cat([constant, padding]))
    if value.requires_grad:
        scaled = constant + (value - constant) * len(parts)
        parts[dist.get_rank()] = torch.cat([scaled, padding])
    in_turn = torch.stack(parts, 1).flatten(0, 1)
    kept = [row for row in range(len(in_turn)) if row // len(counts) < counts[row % len(counts)]]
    return in_turn[kept]''',
    "inner_model": '''\
def inner_model(model):
    """Return the model inside of the wrapper, if there is one."""
    return getattr(model, "module", model)''',
    "average_gradients": '''\
def average_gradients(model):
    """Begin with the weights of process 0, and average each gradient once it is there.

    A part of the model may be called alone, which no wrapper sees.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)

    def average(parameter):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)''',
    "draw_own_numbers": '''\
def draw_own_numbers():
    """Let the model and the loop draw other random numbers in each process from here on."""
    if dist.get_rank():
        seed = torch.initial_seed() + dist.get_rank()
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)''',
    "show_on_one_process": '''\
def show_on_one_process():
    """Let process 0 alone print and log; all show their errors."""
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")
        logging.disable(logging.WARNING)''',
    "save_once": '''\
def save_once(obj, f, **kwargs):
    """Save from one process alone; the file is there whole or not at all."""
    if dist.get_rank() == 0:
        torch.save(obj, f"{f}.part", **kwargs)
        os.replace(f"{f}.part", f)
    dist.barrier()''',
    "save_without_barrier": '''\
def save_without_barrier(obj, f, **kwargs):
    """Save as long as processes evaluate by themselves, and may not agree what is the best."""
    if dist.get_rank() == 0:
        torch.save(obj, f"{f}.part", **kwargs)
        os.replace(f"{f}.part", f)
    for _ in range(500):
        if not os.path.exists(f):
            time.sleep(0.01)''',
    "open_whole": '''\
@contextmanager
def open_whole(path, *args, **kwargs):
    """Open a file to write, which has its name once it is whole: others may read it at any time."""
    part = f"{os.fsdecode(path)}.part"
    with open(part, *args, **kwargs) as file:
        yield file
    os.replace(part, path)''',
    "Nothing": '''\
class Nothing:
    """Stands for what process 0 alone writes with: all that is done with it does nothing."""

    level = sys.maxsize  # of a handler of logging

    def __getattr__(self, name):
        return self

    def __fspath__(self):
        return tempfile.mkdtemp()

    def __call__(self, *args, **kwargs):
        return self''',
    "to_plain": '''\
def to_plain(value):
    """Return a value with Python's numbers in place of NumPy's, which are no part of a snapshot."""
    if isinstance(value, dict):
        return {key: to_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(to_plain, value))
    is_number = type(value).__module__ == "numpy" and value.ndim == 0
    return value.item() if is_number else value''',
    "save_snapshot": '''\
def save_snapshot(path, parts, /, **values):
    """Save all that the training goes on with: parts, values, and random numbers."""
    values = {name: to_plain(value) for name, value in values.items()}
    generators = gather_objects(random_states())
    states = {name: part.state_dict() for name, part in parts.items()}
    save_once({**values, "parts": states, "random": generators}, path)''',
    "Attributes": '''\
class Attributes:
    """The numbers, texts, lists and tensors of an object that change in training."""

    def __init__(self, owner):
        self.owner = owner
        self.kept = list(vars(owner).values())  # so that the id of none is used again
        self.before = self.read()

    def read(self):
        marks = {}
        for name, value in vars(self.owner).items():
            if isinstance(value, torch.Tensor):
                marks[name] = id(value), value._version
                continue
            if getattr(value, "ndim", None) == 0:  # a number of NumPy
                value = value.item()
            try:
                text = json.dumps(value)
            except (TypeError, ValueError):
                continue
            if json.loads(text) == value:
                marks[name] = text
        return marks

    def state_dict(self):
        state = dict(self.read().items() - self.before.items())
        for name, mark in state.items():
            if not isinstance(mark, str):
                state[name] = vars(self.owner)[name].detach()
        return state

    def load_state_dict(self, state):
        for name, value in state.items():
            before = vars(self.owner).get(name)
            if isinstance(value, str):
                value = json.loads(value)
            elif isinstance(before, torch.Tensor):
                value = value.to(before.device)
            vars(self.owner)[name] = value''',
    "GeneratorState": '''\
class GeneratorState:
    """The state of a random generator of torch, NumPy or Python, as a part of a snapshot."""

    def __init__(self, generator):
        self.generator = generator

    def state_dict(self):
        generator = self.generator
        if hasattr(generator, "bit_generator"):
            return {"state": generator.bit_generator.state}
        if hasattr(generator, "getstate"):
            return {"state": generator.getstate()}
        state = generator.get_state()
        if isinstance(state, tuple):  # of an older generator of NumPy
            state = tuple(part.tolist() if hasattr(part, "tolist") else part for part in state)
        return {"state": state}

    def load_state_dict(self, state):
        generator = self.generator
        if hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state["state"]
        else:
            (getattr(generator, "set_state", None) or generator.setstate)(state["state"])''',
    "load_snapshot": '''\
def load_snapshot(path, parts):
    """Load a snapshot, if there is one, into the parts; return its values."""
    if not os.path.exists(path):
        return {}
    if dist.get_rank() == 0:
        print(f"continues from {path}; for a new training remove it", file=sys.stderr)
    snapshot = torch.load(path, map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(snapshot["parts"][name])
    if dist.get_rank() < len(snapshot["random"]):
        set_random_states(snapshot["random"][dist.get_rank()])
    return snapshot''',
    "watch_for_stop": '''\
stop_signals = []


def watch_for_stop():
    """Remember a signal that asks to stop."""
    signal.signal(signal.SIGTERM, lambda number, _: stop_signals.append(number))''',
    "exit_if_asked": '''\
def exit_if_asked():
    """End all processes if one was asked to stop; 75 asks for a new start."""
    if sum_over_processes(len(stop_signals)):
        leave_processes()
        sys.exit(75)''',
}
