"""torchrun --standalone --nproc_per_node=2 lessons/18-recommender/lesson.py

Who likes which film? A number for each user and film, learned from what was rated: embeddings, and
films drawn at random as examples of what was not. Measured by each user's last film among 99
others: is it in the first ten?"""

import argparse
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler


def read_ratings(data_dir):
    """Return (user, film, time) of MovieLens small from its zip, and the name of the data set.

    Without the zip, the ratings are those of people with made-up tastes.
    """
    zips = sorted(data_dir.rglob("ml-latest-small.zip"))
    if zips:
        with zipfile.ZipFile(zips[0]) as archive:
            file = archive.open("ml-latest-small/ratings.csv")
            rows = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 3), dtype=np.int64)
        return rows, "MovieLens small"
    rng = np.random.default_rng(0)
    tastes = rng.normal(size=(400, 4)) @ rng.normal(size=(4, 300))
    popularity = rng.normal(size=300)
    rows = []
    for user, chances in enumerate(np.exp(tastes + popularity)):
        films = rng.choice(300, size=40, replace=False, p=chances / chances.sum())
        rows += [(user, film, time) for time, film in enumerate(films)]
    return np.array(rows), f"no ml-latest-small.zip under {data_dir}: people with made-up tastes"


class Ratings:
    """The data: pairs of user and film, each user's last film, and 99 films it has not rated."""

    def __init__(self, data_dir):
        rows, self.name = read_ratings(data_dir)
        users = torch.from_numpy(np.unique(rows[:, 0], return_inverse=True)[1])
        films = torch.from_numpy(np.unique(rows[:, 1], return_inverse=True)[1])
        self.shape = (int(users.max()) + 1, int(films.max()) + 1)
        order = np.lexsort((films, rows[:, 2], users))
        users = users[order]
        films = films[order]
        is_last = torch.cat([users[1:] != users[:-1], torch.tensor([True])])
        self.pairs = torch.stack([users, films], 1)[~is_last]
        self.last = films[is_last]
        is_unrated = torch.ones(self.shape)
        is_unrated[users, films] = 0
        self.unrated = torch.multinomial(is_unrated, 99, generator=torch.Generator().manual_seed(0))


class MatrixFactorization(nn.Module):
    """Matrix factorization: score(user, film) = user's vector * film's vector + film's bias."""

    def __init__(self, num_users, num_films, width=32):
        super().__init__()
        self.user = nn.Embedding(num_users, width)
        self.film = nn.Embedding(num_films, width)
        self.bias = nn.Embedding(num_films, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.film.weight, std=0.1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users, films):
        """Return scores (n, k) of users (n,) and films (n, k)."""
        products = self.film(films) @ self.user(users)[:, :, None]
        return (products + self.bias(films)).squeeze(2)


def make_model(shape):
    torch.manual_seed(0)
    return MatrixFactorization(*shape)


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


def train_epoch(model, optimizer, loader, device, num_films, negatives=8):
    for step, pairs in enumerate(loader):
        users, films = pairs.to(device).T
        # The user has rated few of the films that are drawn.
        drawn = torch.randint(num_films, (len(users), negatives), device=device)
        scores = model(users, torch.cat([films[:, None], drawn], dim=1))
        target = torch.zeros_like(scores)
        target[:, 0] = 1
        loss = F.binary_cross_entropy_with_logits(scores, target)
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
def hit_rate(ratings, score, device):
    """Return the share of users whose last film is among the ten best of 100, and their number."""
    users = torch.arange(len(ratings.last))[dist.get_rank() :: dist.get_world_size()]
    films = torch.cat([ratings.last[users, None], ratings.unrated[users]], dim=1)
    scores = score(users.to(device), films.to(device))
    better = (scores[:, 1:] >= scores[:, :1]).sum(1)  # equal scores count against us
    counts = torch.tensor([(better < 10).sum(), len(users)], device=device)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item(), int(counts[1])


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
    parser.add_argument("--total_epochs", type=positive, default=10)
    parser.add_argument("--save_every", type=positive, default=5, help="epochs")
    parser.add_argument("--batch_size", type=positive, default=512, help="samples per rank")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--weight_decay", type=float, default=1e-5)
    parser.add_argument("--data_dir", type=Path, default=Path("data/movielens-small"))
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


def train(args, folder, device, until, ratings):
    """Train up to epoch `until`, from a snapshot in `folder` if there is one; return the model."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(ratings.shape).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    sampler = DistributedSampler(ratings.pairs)
    batches = BatchSampler(sampler, args.batch_size, drop_last=False)
    loader = DataLoader(ratings.pairs, sampler=batches, batch_size=None)
    wrote = False
    for epoch in range(load_snapshot(folder, model, optimizer, args, device), until):
        sampler.set_epoch(epoch)  # the order depends only on the epoch, also in a resumed run
        torch.manual_seed(1000 * epoch + rank)  # so do the films that are drawn, for each rank
        train_epoch(model, optimizer, loader, device, ratings.shape[1])
        line = f"[GPU{rank}] Epoch {epoch} | Batchsize: {args.batch_size} | Steps: {len(loader)}"
        print(line, flush=True)
        if rank == 0 and ((epoch + 1) % args.save_every == 0 or epoch + 1 == until):
            save_snapshot(folder, model, optimizer, epoch + 1, args)
            wrote = True
        rate, _ = hit_rate(ratings, model.module, device)
        if rank == 0:
            print(f"       HR@10 {rate:.4f}", flush=True)
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


@record
def main():
    args = parse_args()
    device = join_group(args.device)
    ratings = Ratings(args.data_dir)
    popularity = torch.bincount(ratings.pairs[:, 1], minlength=ratings.shape[1]).to(device)
    baseline, _ = hit_rate(ratings, lambda users, films: popularity[films], device)
    if dist.get_rank() == 0:
        users, films = ratings.shape
        print(f"data: {ratings.name}, {users} users, {films} films", flush=True)
    model = train(args, args.folder, device, args.total_epochs, ratings)
    rate, users = hit_rate(ratings, model.module, device)
    assert users == ratings.shape[0], f"{users} users were counted, not {ratings.shape[0]}"
    assert rate > baseline, f"HR@10 {rate:.4f} is not above that of popularity, {baseline:.4f}"
    if dist.get_rank() == 0:
        print(
            f"claim holds: HR@10 {rate:.4f} over {users} users, each once;"
            f" by popularity alone {baseline:.4f}"
        )
    leave_group()


if __name__ == "__main__":
    main()
