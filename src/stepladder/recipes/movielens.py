"""Train a recommender of films.

    stepladder train movielens --task ranking --data-dir DIR --nproc 2

The data are the ratings of films of MovieLens (Harper and Konstan, 2015). DIR holds ratings.csv, or
the leave-one-out files of He et al. (2017).

`--task ranking` orders the items that a user has not rated. Its models are:

- mf: matrix factorization with biases, score = p_u q_i + b_u + b_i, with the logistic loss and the
  regularization of Rendle et al. (RecSys 2020). The loss is over all items instead of sampled
  ones, so the whole row of a user is one sample.
- hybrid: mf plus the closed-form item weights of EASE (Steck, WWW 2019).
- neumf: neural matrix factorization (He et al., WWW 2017), with negatives that are sampled in every
  pass.

`--task rating` predicts stars, by mf only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepladder import InputError, Job
from stepladder.core.numbers import validate_range
from stepladder.core.order import derive_seed
from stepladder.data.movielens import leave_one_out
from stepladder.data.movielens.ratings import Ratings, read_ratings
from stepladder.recipes._movielens_models import MatrixFactorization, NeuMF, RatingModel
from stepladder.recipes._schedules import count_steps, linear_decay
from stepladder.train.metrics.ranking import MetricSums, fit_ease, ranking_metrics

Batch = list[Tensor]
SumAndCount = tuple[Tensor, int]

FOLDS = 5
NUM_CANDIDATES = 99  # items that a held-out item is ranked against
# A positive is an item that the user rated, a negative one that was drawn. The next three values
# were chosen on the validation split.
NEGATIVE_POWER = 0.15  # draws are in proportion to popularity ** 0.15; in the paper ** 0
USER_POWER = 0.6  # a user's penalty grows with the user's positives ** 0.6; in the paper ** 1
USER_RATE = 4.0  # the learning rate of users' rows, relative to the rate of items' rows
EASE_PENALTY = 500.0


class _Defaults(NamedTuple):
    """Values of the Config for one task and model."""

    epochs: int
    global_batch: int  # users, ratings or pairs in a step
    lr: float
    factors: int
    reg: float
    negatives: int


DEFAULTS = {
    ("ranking", "mf"): _Defaults(
        epochs=40, global_batch=128, lr=0.01, factors=256, reg=0.0045, negatives=12
    ),
    ("ranking", "hybrid"): _Defaults(
        epochs=40, global_batch=128, lr=0.01, factors=256, reg=0.0045, negatives=12
    ),
    ("ranking", "neumf"): _Defaults(
        epochs=20, global_batch=2048, lr=0.002, factors=16, reg=0.0, negatives=4
    ),
    ("rating", "mf"): _Defaults(
        epochs=10, global_batch=2000, lr=0.01, factors=64, reg=0.1, negatives=1
    ),
}


@dataclass
class Config:
    """The settings of the job. Zero, or a negative `reg`, is the default of the task and model."""

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
        defaults = DEFAULTS[self.task, self.model]
        self.epochs = self.epochs or defaults.epochs
        self.global_batch = self.global_batch or defaults.global_batch
        self.lr = self.lr or defaults.lr
        self.factors = self.factors or defaults.factors
        self.negatives = self.negatives or defaults.negatives
        if self.reg < 0:
            self.reg = defaults.reg


def build(config: Config, data: Ratings | leave_one_out.LeaveOneOut | None = None) -> Job:
    """Make the model, the optimizer, the data and the metrics of the job.

    Args:
        config: The settings.
        data: What `load` returns, if it is in memory already; None to load it.

    Returns:
        The job of `--task rating` if the data are ratings, else the job of `--task ranking`.
    """
    if data is None:
        data = load(config)
    torch.manual_seed(config.seed)
    if isinstance(data, Ratings):
        return make_rating_job(config, data)
    return _make_ranking_job(config, data)


def load(config: Config) -> Ratings | leave_one_out.LeaveOneOut:
    """Read what the task needs from the data folder."""
    folder = Path(config.data_dir)
    if config.task == "rating":
        return read_ratings(folder)
    if leave_one_out.has_leave_one_out_files(folder):
        data = leave_one_out.read_leave_one_out(folder)
    else:
        ratings = read_ratings(folder)
        generator = _make_generator("negatives")
        data = leave_one_out.hold_out_latest(ratings, NUM_CANDIDATES, generator)
    if config.validation:
        data = leave_one_out.split_validation(data, _make_generator("validation"))
    return data


def _make_generator(purpose: str) -> np.random.Generator:
    """Make a generator for test sets, which do not depend on the run's seed."""
    return np.random.Generator(np.random.Philox(key=derive_seed("movielens", purpose)))


# -- ranking ---------------------------------------------------------------------------------------


def _make_ranking_job(config: Config, data: leave_one_out.LeaveOneOut) -> Job:
    """Make the job of `--task ranking`."""
    users = torch.arange(len(data.user_ids))
    rated = torch.from_numpy(data.rated_matrix())
    num_users, num_items = rated.shape
    model: Any
    loss: Any
    if config.model == "neumf":
        model = NeuMF(num_users, num_items, config.factors)
        loss = partial(_sampled_logistic_loss, negatives=config.negatives)
        train_data = (torch.from_numpy(data.users), torch.from_numpy(data.items))
        groups = [{"params": list(model.parameters()), "lr": config.lr}]
    else:
        weights = fit_ease(rated, EASE_PENALTY) if config.model == "hybrid" else None
        model = MatrixFactorization(num_users, config.factors, rated.sum(0).float(), weights)
        loss = partial(full_logistic_loss, config=config)
        train_data = (users, rated)
        groups = _make_parameter_groups(model, config.lr)
    optimizer = torch.optim.Adam(groups)
    steps = count_steps(config.epochs, len(train_data[0]), config.global_batch)
    candidates = torch.from_numpy(data.negatives)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=loss,
        train_data=train_data,
        eval_data=(users, rated, torch.from_numpy(data.held_out), candidates),
        metrics=compute_ranking_metrics,
        schedule=linear_decay(optimizer, steps),
        eval_batch=200,
    )


def _make_parameter_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return parameter groups that give users a higher learning rate than items.

    Each user is one sample, so a user's row has one gradient an epoch, and an item's row one a
    step.
    """
    weights = dict(model.named_parameters())
    item_weights = [weight for name, weight in weights.items() if name.startswith("item")]
    user_weights = [weight for name, weight in weights.items() if name.startswith("user")]
    return [{"params": item_weights, "lr": lr}, {"params": user_weights, "lr": USER_RATE * lr}]


def full_logistic_loss(
    model: MatrixFactorization, batch: Batch, config: Config
) -> tuple[Tensor, Tensor]:
    """Return the loss of Rendle et al. in expectation: all items instead of sampled negatives.

    In the paper each positive draws `negatives` items. Here each item counts by how often it would
    be drawn. The penalty follows the paper too: each example penalizes its own vectors and biases,
    so each vector counts by how often it is in an example.

    Args:
        model: The model.
        batch: Users, shape (b,), and what they rated, shape (b, items).
        config: Its `negatives` and `reg`.

    Returns:
        The sum over the batch, and the number of positives.
    """
    users, rated = batch
    is_rated = rated.float()
    num_positives = is_rated.sum(1, keepdim=True)  # (b, 1)
    popularity = model.popularity
    total_positives = popularity.sum()
    # How often one positive draws each item, shape (items,).
    draws = (popularity + 1) ** NEGATIVE_POWER
    draws *= config.negatives / draws.sum()

    user_vectors = model.users(users)
    user_bias = model.user_bias(users)
    item_vectors = model.items.weight
    item_bias = model.item_bias
    scores = user_vectors @ item_vectors.T + item_bias + user_bias
    loss = ((is_rated + num_positives * draws) * F.softplus(scores) - is_rated * scores).sum()

    num_users = model.users.num_embeddings
    # For a user with the mean number of positives, any USER_POWER gives the same penalty.
    scale = (total_positives / num_users) ** (1 - USER_POWER)
    user_examples = (1 + config.negatives) * (num_positives**USER_POWER * scale)

    user_norms = user_vectors.square().sum(1, keepdim=True) + user_bias.square()
    item_examples = popularity + total_positives * draws
    item_norms = item_vectors.square().sum(1) + item_bias.square()
    batch_share = len(users) / num_users
    penalty = (user_examples * user_norms).sum() + batch_share * (item_examples * item_norms).sum()
    return loss + config.reg / 2 * penalty, num_positives.sum()


def _sampled_logistic_loss(model: NeuMF, batch: Batch, negatives: int) -> SumAndCount:
    """Return the logistic loss of pairs, each with `negatives` items drawn uniformly for its user.

    The items come from torch's default generator, which the trainer seeds for each pass.
    """
    users, items = batch
    drawn_items = torch.randint(model.num_items, (negatives, len(users)), device=items.device)
    all_users = users.repeat(1 + negatives)
    all_items = torch.cat([items, drawn_items.view(-1)])
    scores = model.score_pairs(all_users, all_items)
    labels = torch.zeros_like(scores)
    labels[: len(items)] = 1
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="sum"), len(scores)


def compute_ranking_metrics(model: nn.Module, batch: Batch) -> MetricSums:
    """Return the sum and the count of each ranking metric on a batch of users."""
    users, rated, held_out, candidates = batch
    return ranking_metrics(model(users, rated), held_out, candidates, rated)


# -- rating ----------------------------------------------------------------------------------------


def make_rating_job(config: Config, data: Ratings) -> Job:
    """Make the job of `--task rating`: one of five random folds is the test set.

    The folds are the same for every seed.

    Returns:
        A job that predicts stars and reports the mean squared error and its root, `rmse`.

    Raises:
        InputError: There are too few ratings for a training and a test set.
    """
    users = torch.from_numpy(data.users)
    items = torch.from_numpy(data.items)
    stars = torch.from_numpy(data.ratings)
    fold = torch.from_numpy(_make_generator("folds").permutation(len(stars)) % FOLDS)
    train = fold != config.fold
    test = fold == config.fold
    if not train.any() or not test.any():
        raise InputError(f"{len(stars)} ratings make no {FOLDS} folds", "a larger ratings.csv")
    train_data = (users[train], items[train], stars[train])
    model = RatingModel(len(data.user_ids), len(data.item_ids), config.factors, *train_data)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
    steps = count_steps(config.epochs, len(train_data[0]), config.global_batch)
    return Job(
        model=model,
        optimizer=optimizer,
        loss=partial(_penalized_squared_error, reg=config.reg),
        train_data=train_data,
        eval_data=(users[test], items[test], stars[test]),
        metrics=_mean_squared_error,
        derived=lambda means: {"rmse": means["mse"] ** 0.5},
        schedule=linear_decay(optimizer, steps),
    )


def _penalized_squared_error(model: Any, batch: Batch, reg: float) -> SumAndCount:
    """Return the squared error of a batch plus the L2 penalty of its vectors, and its size."""
    users, items, stars = batch
    penalty = model.users(users).square().sum() + model.items(items).square().sum()
    error = (model.score_pairs(users, items) - stars).square().sum()
    return error + reg * penalty, len(stars)


def _mean_squared_error(model: Any, batch: Batch) -> MetricSums:
    """Return the sum of the squared errors of a batch, and its size."""
    users, items, stars = batch
    prediction = model.score_pairs(users, items).clamp(0.5, 5.0)
    return {"mse": ((prediction - stars).double().square().sum(), len(stars))}
