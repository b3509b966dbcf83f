"""stepladder train movielens --task ranking --data-dir DIR --nproc 2

Recommendation on MovieLens (Harper and Konstan, 2015). DIR holds ratings.csv, or the leave-one-out
files of He et al. (2017). `--task ranking` orders the items that a user has not rated, `--task
rating` predicts stars.

mf      matrix factorisation with biases: score = p_u q_i + b_u + b_i. The logistic loss and the regulariser of
        Rendle et al. (RecSys 2020), over all items at once instead of sampled ones: a user's row is one sample.
hybrid  the same, plus the closed-form item weights of EASE (Steck, WWW 2019).
neumf   neural matrix factorisation (He et al., WWW 2017), with negatives sampled in every pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import InputError, Job
from stepladder.core.numbers import validate_range
from stepladder.core.order import derive_seed
from stepladder.data.movielens import leave_one_out
from stepladder.data.movielens.ratings import Ratings, damped_means, read_ratings
from stepladder.train.metrics.ranking import MetricSums, fit_ease, ranking_metrics

FOLDS = 5
NEGATIVE_POWER = (
    0.15  # of an item's popularity: how often it is met as a negative; the paper's 0 is uniform
)
USER_POWER = (
    0.6  # of a user's positives: how strongly the user's vector is held down; the paper's is 1
)
USER_RATE = 4.0  # the learning rate of users' rows, in that of items'
EASE_SHARE = 6.0  # of EASE's scores in the hybrid's; all four chosen on the validation split
# Per (task, model): epochs; users, ratings or pairs per step; learning rate; factors;
# regularisation; negatives
DEFAULTS = {
    ("ranking", "mf"): (40, 128, 0.01, 256, 0.0045, 12),
    ("ranking", "hybrid"): (40, 128, 0.01, 256, 0.0045, 12),
    ("ranking", "neumf"): (20, 2048, 0.002, 16, 0.0, 4),
    ("rating", "mf"): (10, 2000, 0.01, 64, 0.1, 1),
}


@dataclass
class Config:
    """Zero, or a negative regularisation: the default of this task and model."""

    epochs: int = 0
    global_batch: int = 0
    lr: float = 0.0
    seed: int = 0
    data_dir: str = "data/movielens-small"
    task: Literal["ranking", "rating"] = "ranking"  # order items for a user, or predict ratings
    model: Literal["mf", "hybrid", "neumf"] = "mf"  # hybrid: mf with EASE's item weights
    factors: int = 0  # length of each embedding; 0: the model's own
    reg: float = -1.0  # L2 penalty; negative: the model's own
    negatives: int = 0  # items without a rating, drawn per rating; 0: the model's own
    fold: int = 0  # which fifth of the ratings is held out, with --task rating
    validation: bool = False  # evaluate on a part of the training data, held out for it

    def __post_init__(self) -> None:
        if (self.task, self.model) not in DEFAULTS:
            raise InputError(
                f"--task {self.task} has no model {self.model}", f"--task {self.task} --model mf"
            )
        validate_range(self, 0, FOLDS - 1, "fold")
        validate_range(self, 0, 1e5, "factors", "negatives")
        validate_range(self, -1e6, 1e6, "reg")
        epochs, batch, lr, factors, reg, negatives = DEFAULTS[self.task, self.model]
        self.epochs, self.global_batch = self.epochs or epochs, self.global_batch or batch
        self.lr, self.factors = self.lr or lr, self.factors or factors
        self.reg = reg if self.reg < 0 else self.reg
        self.negatives = self.negatives or negatives


def build(config: Config, data: Ratings | leave_one_out.LeaveOneOut | None = None) -> Job:
    data = load(config) if data is None else data
    torch.manual_seed(config.seed)
    return rating_job(config, data) if isinstance(data, Ratings) else ranking_job(config, data)


def load(config: Config) -> Ratings | leave_one_out.LeaveOneOut:
    """What the task needs from the data folder."""
    folder = Path(config.data_dir)
    if config.task == "rating":
        return read_ratings(folder)
    if leave_one_out.is_leave_one_out(folder):
        data = leave_one_out.read_leave_one_out(folder)
    else:
        data = leave_one_out.latest_left_out(read_ratings(folder), 99, drawn("negatives"))
    return leave_one_out.validation_split(data, drawn("validation")) if config.validation else data


def drawn(purpose: str) -> np.random.Generator:
    """Test sets do not depend on the run's seed."""
    return np.random.Generator(np.random.Philox(key=derive_seed("movielens", purpose)))


def ranking_job(config: Config, data: leave_one_out.LeaveOneOut) -> Job:
    users, rated = torch.arange(len(data.user_ids)), torch.from_numpy(data.rated())
    num_users, num_items = rated.shape
    model: Any
    loss: Any
    if config.model == "neumf":
        model = NeuMF(num_users, num_items, config.factors)
        loss = partial(sampled_logistic, negatives=config.negatives)
        train_data = (torch.from_numpy(data.users), torch.from_numpy(data.items))
    else:
        weights = fit_ease(rated, 500.0) if config.model == "hybrid" else None
        model = Factors(num_users, config.factors, rated.sum(0).float(), weights)
        loss = partial(whole_logistic, config=config)
        train_data = (users, rated)
    optimizer = torch.optim.Adam(groups(model, config.lr))
    steps = config.epochs * -(-len(train_data[0]) // config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=train_data,
        eval_data=(users, rated, torch.from_numpy(data.held_out), torch.from_numpy(data.negatives)),
        metrics=ranking,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps),
        eval_batch=200,
    )


def groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Where a user is a sample, a user's row has one gradient an epoch, an item's one a step: it
    moves faster.
    """
    if isinstance(model, NeuMF):
        return [{"params": list(model.parameters()), "lr": lr}]
    named = dict(model.named_parameters())
    slow = [parameter for name, parameter in named.items() if name.startswith("item")]
    fast = [parameter for name, parameter in named.items() if name.startswith("user")]
    return [{"params": slow, "lr": lr}, {"params": fast, "lr": USER_RATE * lr}]


def whole_logistic(model: Factors, batch: list[Tensor], config: Config) -> tuple[Tensor, Tensor]:
    """Rendle et al.'s loss over `negatives` items per positive, summed over all items in
    expectation.

    users (b,), rated (b, items). The regulariser is theirs too: on the vectors and biases of each
    example, so by how often they are met."""
    users, rated = batch
    x = rated.float()
    positives = x.sum(1, keepdim=True)
    popularity = model.popularity
    drawn = (popularity + 1) ** NEGATIVE_POWER
    drawn *= config.negatives / drawn.sum()  # how often one positive draws each item
    p, user_bias = model.users(users), model.user_bias(users)
    q, item_bias = model.items.weight, model.item_bias
    softplus = F.softplus(scores := p @ q.T + item_bias + user_bias)
    loss = ((x + positives * drawn) * softplus - x * scores).sum()
    met = popularity + popularity.sum() * drawn
    held = positives**USER_POWER * (popularity.sum() / model.users.num_embeddings) ** (
        1 - USER_POWER
    )
    of_users = (
        (1 + config.negatives) * held * (p.square().sum(1, keepdim=True) + user_bias.square())
    )
    of_items = met * (q.square().sum(1) + item_bias.square())
    share = len(users) / model.users.num_embeddings
    return loss + config.reg / 2 * (of_users.sum() + share * of_items.sum()), positives.sum()


def sampled_logistic(model: NeuMF, batch: list[Tensor], negatives: int) -> tuple[Tensor, int]:
    """Each pair and `negatives` items drawn uniformly for its user, by the generator that belongs
    to the pass.
    """
    users, items = batch
    others = torch.randint(model.num_items, (negatives, len(users)), device=items.device)
    scores = model.pairs(users.repeat(1 + negatives), torch.cat([items, others.view(-1)]))
    labels = torch.zeros_like(scores)
    labels[: len(items)] = 1
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum"), len(scores)


def ranking(model: nn.Module, batch: list[Tensor]) -> MetricSums:
    users, rated, held_out, others = batch
    return ranking_metrics(model(users, rated), held_out, others, rated)


class Factors(nn.Module):
    """p_u q_i + b_u + b_i for all items, shape (users, items), plus the user's items times
    `weights` if given.

    popularity: how many users have rated each item, shape (items,).

    Gradients are dense: they travel in flat buckets, Adam moves every row anyway, and a sparse
    all-reduce of gloo costs more than these 7.6 MB."""

    popularity: Tensor

    def __init__(
        self, users: int, factors: int, popularity: Tensor, weights: Tensor | None = None
    ) -> None:
        super().__init__()
        items = len(popularity)
        self.users, self.items = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Parameter(torch.zeros(items))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)
        self.weights: Tensor | None
        self.register_buffer(
            "weights", weights, persistent=False
        )  # computed from the data, not trained
        self.register_buffer("popularity", popularity, persistent=False)

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        scores = self.users(users) @ self.items.weight.T + self.item_bias + self.user_bias(users)
        return (
            scores if self.weights is None else scores + EASE_SHARE * (rated.float() @ self.weights)
        )


class NeuMF(nn.Module):
    """GMF beside an MLP of three layers, one linear output over both; no pre-training."""

    def __init__(self, users: int, items: int, factors: int) -> None:
        super().__init__()
        self.num_items, width = items, 4 * factors
        self.gmf_users, self.gmf_items = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.mlp_users, self.mlp_items = nn.Embedding(users, width), nn.Embedding(items, width)
        for table in (self.gmf_users, self.gmf_items, self.mlp_users, self.mlp_items):
            nn.init.normal_(table.weight, std=0.01)
        self.first = nn.Linear(2 * width, width)
        self.rest = nn.Sequential(
            nn.ReLU(),
            nn.Linear(width, width // 2),
            nn.ReLU(),
            nn.Linear(width // 2, factors),
            nn.ReLU(),
        )
        self.out = nn.Linear(2 * factors, 1)

    def pairs(self, users: Tensor, items: Tensor) -> Tensor:
        """Scores of pairs, shape (n,)."""
        deep = self.rest(self.first(torch.cat([self.mlp_users(users), self.mlp_items(items)], 1)))
        both = torch.cat([self.gmf_users(users) * self.gmf_items(items), deep], 1)
        return self.out(both).squeeze(1)

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        """All items of each user: the first layer's two halves are computed once per user and once
        per item.
        """
        of_users, of_items = self.first.weight.split(self.mlp_users.embedding_dim, 1)
        left = self.mlp_users(users) @ of_users.T + self.first.bias
        right = self.mlp_items.weight @ of_items.T
        wide, deep = self.out.weight[0].split(self.gmf_users.embedding_dim)
        product = (self.gmf_users(users) * wide) @ self.gmf_items.weight.T
        rows = [
            self.rest(row + right) @ deep for row in left
        ]  # a user at a time: 3706 x 64 floats stay in cache
        return product + torch.stack(rows) + self.out.bias


def rating_job(config: Config, data: Ratings) -> Job:
    """One of five random folds is the test set; the same folds for every seed."""
    users, items, stars = (
        torch.from_numpy(array) for array in (data.users, data.items, data.ratings)
    )
    fold = torch.from_numpy(drawn("folds").permutation(len(stars)) % FOLDS)
    train, test = fold != config.fold, fold == config.fold
    if not (train.any() and test.any()):
        raise InputError(f"{len(stars)} ratings make no {FOLDS} folds", "a larger ratings.csv")
    shape = (len(data.user_ids), len(data.item_ids), config.factors)
    model = Stars(*shape, users[train], items[train], stars[train])
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = config.epochs * -(-int(train.sum()) // config.global_batch)

    def loss(model: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
        users, items, stars = batch
        size = model.users(users).square().sum() + model.items(items).square().sum()
        return (model.pairs(users, items) - stars).square().sum() + config.reg * size, len(stars)

    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=(users[train], items[train], stars[train]),
        eval_data=(users[test], items[test], stars[test]),
        metrics=squared_error,
        derived=lambda means: {"rmse": means["mse"] ** 0.5},
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps),
    )


def squared_error(model: Any, batch: list[Tensor]) -> MetricSums:
    users, items, stars = batch
    guess = model.pairs(users, items).clamp(0.5, 5.0)
    return {"mse": ((guess - stars).double().square().sum(), len(stars))}


class Stars(nn.Module):
    """mean + b_u + b_i + p_u q_i. A user or item without a training rating keeps zeros: the rest of
    the sum.
    """

    def __init__(self, num_users: int, num_items: int, factors: int, *ratings: Tensor) -> None:
        super().__init__()
        users, items, stars = ratings
        self.users, self.items = nn.Embedding(num_users, factors), nn.Embedding(num_items, factors)
        mean, *biases = damped_means(
            num_users, num_items, users.numpy(), items.numpy(), stars.numpy()
        )
        self.user_bias, self.item_bias = (
            nn.Parameter(torch.from_numpy(bias).float()) for bias in biases
        )
        self.mean: Tensor
        self.register_buffer("mean", torch.tensor(mean))
        for table, seen in ((self.users, users), (self.items, items)):
            nn.init.normal_(table.weight, std=0.05)
            table.weight.data[torch.bincount(seen, minlength=len(table.weight)) == 0] = 0

    def pairs(self, users: Tensor, items: Tensor) -> Tensor:
        product = (self.users(users) * self.items(items)).sum(1)
        return self.mean + self.user_bias[users] + self.item_bias[items] + product

    def forward(self, users: Tensor, rated: Tensor) -> Tensor:
        """All items of each user, shape (users, items)."""
        biases = self.mean + self.user_bias[users][:, None] + self.item_bias
        return biases + self.users(users) @ self.items.weight.T
