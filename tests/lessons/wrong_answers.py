"""Typical wrong answers to exercises: the function as a learner may write it, and what is said.

Each replaces the function of its name in the solution.
"""

from __future__ import annotations

WRONG_ANSWERS: dict[str, list[tuple[str, str]]] = {
    "mean-of-means": [
        ("def mean_loss(losses):\n    return 2.0\n", "the mean over all samples is"),
        ("def mean_loss(losses):\n    return losses.mean().item()\n", "is 2.0, reported is 1.0"),
        (
            "def mean_loss(losses):\n    dist.all_reduce(losses)\n    return losses.mean().item()\n",
            "exit code",
        ),
        (
            "def mean_loss(losses):\n    total = losses.sum()\n    dist.all_reduce(total)\n"
            "    return (total / len(losses)).item()\n",
            "the mean over all samples is 2.0",
        ),
        (
            "def mean_loss(losses):\n    total = losses.sum()\n    dist.all_reduce(total)\n"
            "    return (total / 8 / dist.get_world_size()).item()\n",
            "is 2.0, reported is 1.0",
        ),
    ],
    "share-the-work": [
        ("def my_samples(rank, num_ranks):\n    return SAMPLES[:3]\n", "not yet"),
        ("def my_samples(rank, num_ranks):\n    return SAMPLES[rank:]\n", "not yet"),
        ("def my_samples(rank, num_ranks):\n    return SAMPLES[::num_ranks]\n", "not yet"),
        (
            "def my_samples(rank, num_ranks):\n    size = len(SAMPLES) // num_ranks\n"
            "    return SAMPLES[rank * size : (rank + 1) * size]\n",
            "not yet",
        ),
        ("def my_samples(rank, num_ranks):\n    return SAMPLES[rank]\n", "exit code 1"),
    ],
    "clip-before-average": [
        ("def step(weight):\n    weight.data -= weight.grad\n", "not yet"),
        (
            "def step(weight):\n    dist.all_reduce(weight.grad)\n"
            "    torch.nn.utils.clip_grad_norm_([weight], MAX_NORM)\n"
            "    weight.grad /= dist.get_world_size()\n    weight.data -= weight.grad\n",
            "not yet",
        ),
        (
            "def step(weight):\n    dist.all_reduce(weight.grad)\n"
            "    weight.grad /= dist.get_world_size()\n    weight.data -= weight.grad\n",
            "not yet",
        ),
        (
            "def step(weight):\n    torch.nn.utils.clip_grad_norm_([weight], MAX_NORM)\n"
            "    dist.all_reduce(weight.grad)\n    weight.data -= weight.grad\n",
            "not yet",
        ),
        (
            "def step(weight):\n    dist.all_reduce(weight.grad)\n"
            "    weight.grad /= dist.get_world_size()\n    weight.grad.clamp_(-1, 1)\n"
            "    weight.data -= weight.grad\n",
            "not yet",
        ),
    ],
    "same-samples": [
        (
            "def make_loader(data, epoch):\n"
            "    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))\n",
            "both epochs have the same order",
        ),
        (
            "def make_loader(data, epoch):\n"
            "    return DataLoader(data, batch_size=2, shuffle=True)\n",
            "80 samples were read in an epoch of 40",
        ),
        (
            "def make_loader(data, epoch):\n"
            "    half = torch.utils.data.Subset(data, range(20))\n"
            "    return DataLoader(half, batch_size=4, shuffle=True)\n",
            "not every sample was read once",
        ),
        (
            "def make_loader(data, epoch):\n"
            "    mine = range(dist.get_rank() * 20, dist.get_rank() * 20 + 20)\n"
            "    return DataLoader(torch.utils.data.Subset(data, mine), batch_size=4)\n",
            "both epochs have the same order",
        ),
        (
            "def make_loader(data, epoch):\n    sampler = DistributedSampler(data)\n"
            "    sampler.set_epoch(epoch)\n"
            "    return DataLoader(data, batch_size=2, sampler=sampler)\n",
            "a batch has other than 4 samples",
        ),
        (
            "def make_loader(data, epoch):\n    torch.manual_seed(dist.get_rank())\n"
            "    return DataLoader(data, batch_size=4, shuffle=True)\n",
            "80 samples were read in an epoch of 40",
        ),
    ],
    "synced-too-early": [
        (
            "def accumulate(model, batches):\n    for batch in batches:\n"
            "        with model.no_sync():\n"
            "            (model(batch).mean() / len(batches)).backward()\n",
            "steps with different gradients",
        ),
        (
            "def accumulate(model, batches):\n    for batch in batches:\n"
            "        (model(batch).mean() / len(batches)).backward()\n",
            "7 sends for two steps",
        ),
        (
            "def accumulate(model, batches):\n    for index, batch in enumerate(batches):\n"
            "        with nullcontext() if index == 3 else model.no_sync():\n"
            "            (model(batch).mean() / len(batches)).backward()\n",
            "steps with different gradients",
        ),
        (
            "def accumulate(model, batches):\n    for index, batch in enumerate(batches):\n"
            "        with nullcontext() if index == len(batches) - 1 else model.no_sync():\n"
            "            model(batch).mean().backward()\n",
            "gives 6.5 and 6.0",
        ),
        (
            "def accumulate(model, batches):\n    (model(batches[-1]).mean()).backward()\n",
            "gives 6.5 and 6.0",
        ),
    ],
    "metric-added-twice": [
        (
            "def evaluate(batches):\n    counts = torch.zeros(2, dtype=torch.float64)\n"
            "    for batch in batches:\n"
            "        counts += torch.tensor([batch.sum().item(), len(batch)])\n"
            "    return counts.tolist()\n",
            "30 of 40 answers are right",
        ),
        (
            "def evaluate(batches):\n"
            "    batch = torch.cat(batches)\n"
            "    counts = torch.tensor([batch.float().mean().item(), 1.0])\n"
            "    dist.all_reduce(counts)\n    return counts.tolist()\n",
            "30 of 40 answers are right",
        ),
        (
            "def evaluate(batches):\n    counts = torch.zeros(2, dtype=torch.float64)\n"
            "    for batch in batches:\n"
            "        counts = torch.tensor([batch.sum().item(), len(batch)])\n"
            "    dist.all_reduce(counts)\n    return counts.tolist()\n",
            "22 of 30 answers are right",
        ),
        (
            "def evaluate(batches):\n    counts = torch.zeros(2, dtype=torch.float64)\n"
            "    for batch in batches:\n"
            "        counts += torch.tensor([batch.sum().item(), len(batch)])\n"
            "    dist.all_reduce(counts)\n    return (counts / dist.get_world_size()).tolist()\n",
            "30 of 40 answers are right",
        ),
        ("def evaluate(batches):\n    return [30.0, 40.0]\n", "22 of 30 answers are right"),
    ],
    "scaler-left-out": [
        (
            "def load(path, model, optimizer, scaler):\n    snapshot = torch.load(path)\n"
            "    model.load_state_dict(snapshot['model'])\n"
            "    optimizer.load_state_dict(snapshot['optimizer'])\n"
            "    return snapshot['next_step']\n",
            "gradients overflow",
        ),
        (
            "def load(path, model, optimizer, scaler):\n    snapshot = torch.load(path)\n"
            "    model.load_state_dict(snapshot['model'])\n"
            "    optimizer.load_state_dict(snapshot['optimizer'])\n"
            "    scaler.scale = snapshot['scaler']['scale']\n"
            "    return snapshot['next_step']\n",
            "counts its good steps anew",
        ),
        (
            "def load(path, model, optimizer, scaler):\n    snapshot = torch.load(path)\n"
            "    model.load_state_dict(snapshot['model'])\n"
            "    scaler.load_state_dict(snapshot['scaler'])\n"
            "    return snapshot['next_step']\n",
            "another loss scale",
        ),
        (
            "def load(path, model, optimizer, scaler):\n    snapshot = torch.load(path)\n"
            "    model.load_state_dict(snapshot['model'])\n"
            "    optimizer.load_state_dict(snapshot['optimizer'])\n"
            "    scaler.scale = 1.0\n    return snapshot['next_step']\n",
            "another loss scale",
        ),
        (
            "def load(path, model, optimizer, scaler):\n    return 0\n",
            "gradients overflow",
        ),
    ],
}
