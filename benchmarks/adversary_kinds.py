"""Kinds of jobs for adversary.py. A new kind is one function with @kind, which returns a Job.

Nothing here knows how many processes train the job.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import multiprocessing
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from stepladder import Job, Optimizers, mean_loss

ONE_HASH = "one hash"
SAMPLES = 101
FEATURES = 8
CLASSES = 5
WORDS = 17


@dataclass(frozen=True)
class Kind:
    """A job, and what must happen to it.

    Args:
        build: Makes the job.
        refused: Text of the InputError that must end each way; "" if all ways must give one hash.
        by_way: The same for a way that differs from the others, such as {"full": "..."}.
        settings: Settings of the run besides the usual ones.
    """

    build: Callable[[], Job]
    refused: str = ""
    by_way: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def expected(self, way: str) -> str:
        return self.by_way.get(way, self.refused)


KINDS: dict[str, Kind] = {}


def kind(
    refused: str = "",
    full: str | None = None,
    optimizer: str | None = None,
    alone: str | None = None,
    stopped: str | None = None,
    **settings: Any,
) -> Callable[[Callable[[], Job]], Callable[[], Job]]:
    """Add a function that builds a job to KINDS, under its name with spaces.

    Args:
        refused: Text of the InputError that must end it; "" if it must give one hash.
        full: The same with --shard full, if it differs there.
        optimizer: The same with --shard optimizer.
        alone: The same on one process.
        stopped: The same when it is stopped and resumed.
        settings: Settings of the run.
    """
    texts_by_way = {"full": full, "optimizer": optimizer, "1": alone, "2, stopped, 1": stopped}
    by_way = {way: text for way, text in texts_by_way.items() if text is not None}

    def add(build: Callable[[], Job]) -> Callable[[], Job]:
        name = build.__name__.replace("_", " ")
        KINDS[name] = Kind(build, refused, by_way, settings)
        return build

    return add


# -- what the kinds are made of --------------------------------------------------------------------


def vectors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def images() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SAMPLES, 2, 6, 6, generator=generator)
    return x, x.mean((1, 2, 3)).mul(20).long().clamp(-2, 2) + 2


def token_rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(1, WORDS, (SAMPLES, 12), generator=generator)
    return x, x[:, 0] % CLASSES


class Net(nn.Module):
    def __init__(self, activation: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.second(self.activation(self.first(x)))))


def cross_entropy(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(x)


def accuracy(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
    return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def job(
    model: nn.Module | None = None,
    loss: Callable[..., Any] = cross_entropy,
    data: Any = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    **parts: Any,
) -> Job:
    """A job whose parts are the usual ones, if they are not given."""
    model = model or Net()
    trained = [param for param in model.parameters() if param.requires_grad]
    if optimizer is None:
        optimizer = lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9)  # noqa: E731
    return Job(model, optimizer(trained), loss, data or vectors(), **parts)


def layers(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


def on_vectors(*modules: nn.Module) -> nn.Module:
    return layers(nn.Linear(FEATURES, 16), *modules, nn.Linear(16, CLASSES))


def on_images(*modules: nn.Module) -> nn.Module:
    return layers(nn.Conv2d(2, 4, 3, padding=1), *modules, nn.Flatten(), nn.LazyLinear(CLASSES))


def initialized(model: nn.Module, data: Any) -> nn.Module:
    """Give lazy layers their shapes."""
    with torch.no_grad():
        model.eval()(data[0][:2])
    return model.train()


def image_job(*modules: nn.Module, **parts: Any) -> Job:
    return job(initialized(on_images(*modules), images()), data=images(), **parts)


class Of(nn.Module):
    """A module of a function and parts: Of(function, a=nn.Linear(..))(x) calls function(self, x)."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Items(Dataset[Any]):
    """A map-style Dataset of a function of the sample's index."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def mixed_loss(model: nn.Module, batch: Any, share: float, order: Tensor) -> tuple[Tensor, int]:
    x, y = batch
    output = model(share * x + (1 - share) * x[order])
    loss = share * F.cross_entropy(output, y, reduction="sum")
    return loss + (1 - share) * F.cross_entropy(output, y[order], reduction="sum"), len(x)


# -- layers ----------------------------------------------------------------------------------------


@kind()
def perceptron() -> Job:
    return job(metrics=accuracy, eval_data=vectors(), eval_batch=10)


@kind()
def convolutions() -> Job:
    return image_job(nn.ReLU(), nn.Conv2d(4, 4, 3, stride=2), nn.MaxPool2d(2))


@kind(full="row by row")
def channels_last() -> Job:
    model = initialized(on_images(nn.ReLU()), images()).to(memory_format=torch.channels_last)
    return job(model, data=images())


@kind()
def transposed_and_depthwise_convolutions() -> Job:
    return image_job(nn.ConvTranspose2d(4, 4, 2), nn.Conv2d(4, 4, 3, groups=4), nn.GELU())


def recurrent(layer: nn.Module) -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.layer(self.words(x))[0][:, -1])

    model = Of(forward, words=nn.Embedding(WORDS, 8), layer=layer, last=nn.Linear(8, CLASSES))
    return job(model, data=token_rows())


@kind()
def rnn() -> Job:
    return recurrent(nn.RNN(8, 8, batch_first=True))


@kind()
def lstm_with_dropout() -> Job:
    return recurrent(nn.LSTM(8, 8, num_layers=2, dropout=0.3, batch_first=True))


@kind()
def bidirectional_gru() -> Job:
    return recurrent(nn.GRU(8, 4, bidirectional=True, batch_first=True))


@kind()
def transformer_encoder_with_dropout() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.layer(self.words(x), src_key_padding_mask=x == 3).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    parts = {"words": nn.Embedding(WORDS, 8), "layer": layer, "last": nn.Linear(8, CLASSES)}
    return job(Of(forward, **parts), data=token_rows(), optimizer=torch.optim.AdamW)


@kind()
def embedding_bag() -> Job:
    return job(layers(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, CLASSES)), data=token_rows())


@kind()
def layer_norm() -> Job:
    return job(on_vectors(nn.LayerNorm(16), nn.SiLU()))


@kind()
def group_norm() -> Job:
    return image_job(nn.GroupNorm(2, 4), nn.ReLU())


@kind()
def rms_norm() -> Job:
    return job(on_vectors(nn.RMSNorm(16)))


@kind()
def batch_norm() -> Job:
    return job(on_vectors(nn.BatchNorm1d(16), nn.ReLU()), metrics=accuracy, eval_data=vectors())


@kind()
def batch_norm_with_a_cumulative_average() -> Job:
    return job(on_vectors(nn.BatchNorm1d(16, momentum=None), nn.ReLU()))


@kind()
def batch_norm_without_running_statistics() -> Job:
    return job(on_vectors(nn.BatchNorm1d(16, track_running_stats=False), nn.ReLU()))


@kind(full="without a gradient")
def batch_norm_that_some_microbatches_skip() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.first(x)
        if not (x[:, 0] < 1.0).all():
            z = self.norm(z)
        return self.last(F.relu(z))

    parts = {"first": nn.Linear(FEATURES, 16), "norm": nn.BatchNorm1d(16)}
    return job(
        Of(forward, **parts, last=nn.Linear(16, CLASSES)), metrics=accuracy, eval_data=vectors()
    )


@kind()
def batch_norm_that_is_called_twice() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)) + self.norm(self.first(x.flip(0))))

    parts = {"first": nn.Linear(FEATURES, 16), "norm": nn.BatchNorm1d(16)}
    return job(Of(forward, **parts, last=nn.Linear(16, CLASSES)))


@kind()
def frozen_batch_norm() -> Job:
    model = on_vectors(nn.BatchNorm1d(16))
    model[1].eval().requires_grad_(False)
    return job(model)


@kind(refused="buffer")
def instance_norm_with_running_statistics() -> Job:
    return image_job(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))


@kind()
def instance_norm() -> Job:
    return image_job(nn.InstanceNorm2d(4, affine=True))


@kind(refused="SyncBatchNorm")
def sync_batch_norm() -> Job:
    return job(nn.SyncBatchNorm.convert_sync_batchnorm(on_vectors(nn.BatchNorm1d(16))))


@kind()
def dropout_of_five_kinds() -> Job:
    kinds = (nn.Dropout(0.2), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1))
    return image_job(*kinds, nn.Dropout2d(0.2), nn.RReLU())


@kind(refused="buffer")
def spectral_norm() -> Job:
    model = Net()
    parametrizations.spectral_norm(model.second)
    return job(model)


@kind()
def weight_norm() -> Job:
    model = Net()
    parametrizations.weight_norm(model.second)
    return job(model)


@kind()
def orthogonal_parametrization() -> Job:
    model = Net()
    parametrizations.orthogonal(model.second)
    return job(model)


@kind()
def symmetric_parametrization() -> Job:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    model = Net()
    parametrize.register_parametrization(model.second, "weight", Symmetric())
    return job(model)


@kind(full="single number")
def learned_scale_of_no_dimensions() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.net(x) * self.scale

    model = Of(forward, net=Net())
    model.scale = nn.Parameter(torch.tensor(1.5))
    return job(model)


@kind()
def prelu_and_bilinear() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.act(self.both(x, x.flip(1))))

    parts = {"both": nn.Bilinear(FEATURES, FEATURES, 16), "act": nn.PReLU()}
    return job(Of(forward, **parts, last=nn.Linear(16, CLASSES)))


# -- losses ----------------------------------------------------------------------------------------


@kind()
def ctc() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        logits = model(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        targets = torch.stack([y, y.flip(0)], 1) + 1
        target_lengths = torch.full((len(x),), 2)
        return F.ctc_loss(logits, targets, lengths, target_lengths, reduction="sum"), len(x)

    return job(layers(nn.Embedding(WORDS, 8), nn.Linear(8, CLASSES + 1)), loss, token_rows())


@kind()
def contrastive_in_batch() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        z = F.normalize(model(batch[0]), dim=1)
        w = F.normalize(model(batch[0] + 0.1 * torch.randn_like(batch[0])), dim=1)
        return F.cross_entropy(z @ w.T / 0.1, torch.arange(len(z)), reduction="sum"), len(z)

    return job(loss=loss)


@kind()
def triplets_of_a_random_order() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        z = model(batch[0])
        order = torch.randperm(len(z))
        return F.triplet_margin_loss(z, z.roll(1, 0), z[order], reduction="sum"), len(z)

    return job(loss=loss)


@kind()
def focal_loss_with_label_smoothing() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)
        return ((1 - (-losses).exp()) ** 2 * losses).sum(), len(losses)

    return job(loss=loss)


@kind()
def token_counts() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, _ = batch
        targets = x.roll(-1, 1).masked_fill(x > 12, -100)
        logits = model(x).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), int(
            (targets != -100).sum()
        )

    return job(layers(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)), loss, token_rows())


@kind()
def count_that_is_a_tensor() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        mask = batch[0][:, 0] > 0
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * mask).sum(), mask.sum()

    return job(loss=loss)


@kind()
def mean_of_a_criterion() -> Job:
    return job(loss=mean_loss(nn.CrossEntropyLoss()))


@kind()
def loss_of_half_precision() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        value, count = cross_entropy(model, batch)
        return value.bfloat16(), count

    return job(loss=loss)


@kind(refused="loss")
def loss_that_is_a_float() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[float, int]:
        value, count = cross_entropy(model, batch)
        return value.item(), count

    return job(loss=loss)


@kind(refused="is nan")
def loss_that_becomes_nan() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        value, count = cross_entropy(model, batch)
        return value * (math.nan if (batch[0][:, 0] > 2.2).any() else 1.0), count

    return job(loss=loss)


@kind()
def microbatches_without_a_count() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        mask = (batch[0][:, 0] > 0.3).float()
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return (losses * mask).sum(), int(mask.sum())

    return job(loss=loss)


# -- random numbers --------------------------------------------------------------------------------


@kind(full="not gathered")
def variational_sampling() -> Job:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        mean, log_scale = model.encode(batch[0]).chunk(2, 1)
        z = mean + log_scale.exp() * torch.randn_like(mean)
        divergence = (mean**2 + (2 * log_scale).exp() - 2 * log_scale).sum()
        return F.mse_loss(model.decode(z), batch[0], reduction="sum") + divergence, len(z)

    parts = {"encode": nn.Linear(FEATURES, 8), "decode": nn.Linear(4, FEATURES)}
    return job(Of(lambda self, x: x, **parts), loss, optimizer=torch.optim.Adam)


@kind()
def distributions_of_torch() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        noise = torch.distributions.Beta(0.4, 0.4).sample((len(batch[0]), 1))
        return cross_entropy(model, (batch[0] * noise, batch[1]))

    return job(loss=loss)


@kind()
def mixup_by_numpy() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        share = float(np.random.beta(0.4, 0.4))
        return mixed_loss(model, batch, share, torch.randperm(len(batch[0])))

    return job(loss=loss)


@kind()
def mixup_by_random() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        order = list(range(len(batch[0])))
        random.shuffle(order)
        return mixed_loss(model, batch, random.betavariate(0.4, 0.4), torch.tensor(order))

    return job(loss=loss)


@kind()
def cutmix_by_numpy_in_the_forward_pass() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and np.random.rand() < 0.5:
            corner = np.random.randint(0, 4)
            x = x.clone()
            x[:, :, corner : corner + 2] = x.flip(0)[:, :, corner : corner + 2]
        return self.net(x)

    net = initialized(on_images(nn.ReLU()), images())
    return job(Of(forward, net=net), data=images())


@kind()
def random_numbers_from_the_ninth_step_on() -> Job:
    steps = itertools.count()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        late = model.last.weight.detach().abs().max() > 0.32
        next(steps)
        return cross_entropy(model, (batch[0] * (random.random() if late else 1), batch[1]))

    return job(loss=loss)


@kind()
def random_numbers_for_some_microbatches() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        factor = np.random.rand() if (batch[0][:, 0] > 1.5).any() else 1.0
        return cross_entropy(model, (batch[0] * factor, batch[1]))

    return job(loss=loss)


@kind()
def random_layer_drop() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.first(x)
        for layer in (self.second, self.third):
            if not self.training or random.random() > 0.3:
                z = z + F.relu(layer(z))
        return self.last(z)

    parts = {"first": nn.Linear(FEATURES, 16), "second": nn.Linear(16, 16)}
    return job(Of(forward, **parts, third=nn.Linear(16, 16), last=nn.Linear(16, CLASSES)))


KINDS["random layer drop"] = Kind(random_layer_drop, by_way={"full": "gradient after a microbatch"})


@kind()
def random_metrics_in_evaluation() -> Job:
    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        noise = np.random.rand() + random.random() + torch.rand(())
        return {"noise": ((model(batch[0]) * noise).sum(), len(batch[0]))}

    return job(metrics=metrics, eval_data=vectors(), eval_batch=10)


@kind()
def random_augmentation_in_a_dataset() -> Job:
    x, y = vectors()
    noise = lambda: np.random.rand() + random.random() + torch.rand(FEATURES)  # noqa: E731
    return job(data=Items(lambda index: (x[index] * noise(), y[index])))


@kind()
def random_augmentation_in_workers() -> Job:
    x, y = vectors()
    noise = lambda: np.random.rand() + random.random() + torch.rand(FEATURES)  # noqa: E731
    return job(data=Items(lambda index: (x[index] * noise(), y[index])), num_workers=2)


def noisy_collate(items: list[Any]) -> Any:
    x, y = default_collate(items)
    return x * (np.random.rand() + random.random()) + torch.randn_like(x), y


@kind()
def random_collate() -> Job:
    x, y = vectors()
    return job(data=Items(lambda index: (x[index], y[index])), collate=noisy_collate)


@kind()
def random_collate_in_workers() -> Job:
    x, y = vectors()
    data = Items(lambda index: (x[index] * random.random(), y[index]))
    return job(data=data, collate=noisy_collate, num_workers=2)


class RandomSource:
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw
        self.x, self.y = vectors()
        self.chunk_edges = [0, SAMPLES]

    def __len__(self) -> int:
        return SAMPLES

    def read(self, indices: Any) -> Any:
        rows = torch.as_tensor(indices)
        return self.x[rows] * self.draw(), self.y[rows]


@kind(refused="other data")
def source_that_draws_from_numpy() -> Job:
    return job(data=RandomSource(np.random.rand))


@kind(refused="other data")
def source_that_draws_from_torch() -> Job:
    return job(data=RandomSource(lambda: torch.rand(()).item()))


# -- data ------------------------------------------------------------------------------------------


@kind()
def batches_that_are_dicts() -> Job:
    x, y = vectors()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, (batch["x"], batch["y"]))

    return job(loss=loss, data={"x": x, "y": y})


@kind()
def batches_that_are_nested() -> Job:
    x, y = vectors()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, (batch["in"]["x"], batch["out"][0]))

    return job(loss=loss, data=Items(lambda index: {"in": {"x": x[index]}, "out": (y[index],)}))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@kind()
def batches_that_are_named_tuples() -> Job:
    x, y = vectors()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, (batch.x, batch.y))

    return job(loss=loss, data=Items(lambda index: Pair(x[index], y[index])))


@kind()
def sequences_of_different_lengths() -> Job:
    x, y = token_rows()

    def collate(items: list[Any]) -> Any:
        padded = nn.utils.rnn.pad_sequence([item[0] for item in items], batch_first=True)
        return padded, torch.stack([item[1] for item in items])

    model = layers(nn.Embedding(WORDS, 8), Of(lambda self, z: z.mean(1)), nn.Linear(8, CLASSES))
    data = Items(lambda index: (x[index][: 3 + index % 9], y[index]))
    return job(model, data=data, collate=collate)


@kind(refused="IterableDataset")
def iterable_dataset() -> Job:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(*vectors(), strict=True)

    return job(data=Stream())


@kind()
def arrays_of_numpy() -> Job:
    return job(data=tuple(part.numpy() for part in vectors()))


@kind(global_batch=10, microbatch=2)
def last_batch_of_one_sample() -> Job:
    return job(on_vectors(nn.BatchNorm1d(16)))


@kind()
def batch_that_the_loss_writes_to() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        batch[0].mul_(0.5).add_(torch.randn_like(batch[0]))
        return cross_entropy(model, batch)

    return job(loss=loss)


# -- weights ---------------------------------------------------------------------------------------


@kind()
def tied_weights() -> Job:
    words_layer = nn.Embedding(WORDS, 8)
    last = nn.Linear(8, WORDS, bias=False)
    last.weight = words_layer.weight

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, _ = batch
        return F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="sum"), x.numel()

    return job(layers(words_layer, nn.Linear(8, 8), last), loss, token_rows())


@kind()
def frozen_parts() -> Job:
    model = Net()
    model.first.requires_grad_(False)
    return job(model)


@kind(full="without a gradient")
def unused_parameters() -> Job:
    model = Net()
    model.unused = nn.Linear(3, 4)
    return job(model)


@kind(full="gradient")
def parts_that_some_microbatches_skip() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.first(x)
        if (x[:, 0] > 1.5).any():
            z = z + self.second(z)
        return self.last(z)

    parts = {"first": nn.Linear(FEATURES, 16), "second": nn.Linear(16, 16)}
    return job(Of(forward, **parts, last=nn.Linear(16, CLASSES)))


@kind()
def layer_that_is_used_three_times() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.first(x)
        for _ in range(3):
            z = torch.tanh(self.second(z))
        return self.last(z)

    return job(
        Of(
            forward,
            first=nn.Linear(FEATURES, 16),
            second=nn.Linear(16, 16),
            last=nn.Linear(16, CLASSES),
        )
    )


@kind()
def low_rank_adapters() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))

    base = Net().requires_grad_(False)
    up = nn.Linear(4, CLASSES, bias=False)
    nn.init.zeros_(up.weight)
    model = Of(forward, base=base, down=nn.Linear(FEATURES, 4, bias=False), up=up)
    return job(model, optimizer=torch.optim.AdamW)


@kind()
def average_of_the_weights() -> Job:
    return job(ema_decay=0.9, metrics=accuracy, eval_data=vectors())


@kind(refused="teacher")
def teacher_that_moves_in_the_forward_pass() -> Job:
    @torch.no_grad()
    def forward(self: Any, x: Tensor) -> Tensor:
        pairs = zip(self.student.parameters(), self.teacher.parameters(), strict=True)
        for ours, theirs in pairs:
            theirs.mul_(0.9).add_(ours, alpha=0.1)
        target = self.teacher(x)
        with torch.enable_grad():
            return self.student(x) + 0 * target

    return job(Of(forward, student=Net(), teacher=Net().requires_grad_(False)))


@kind(refused="second.weight")
def weight_divided_by_its_norm() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.net.second.weight.div_(self.net.second.weight.norm().clamp(min=1.0))
        return self.net(x)

    return job(Of(forward, net=Net()))


@kind(refused="weight")
def embedding_with_a_largest_norm() -> Job:
    model = layers(nn.Embedding(WORDS, 8, max_norm=0.5), nn.Flatten(), nn.Linear(96, CLASSES))
    return job(model, data=token_rows())


@kind(refused="second.weight")
def weight_clipped_through_data() -> Job:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        model.second.weight.data.clamp_(-0.1, 0.1)
        return cross_entropy(model, batch)

    return job(loss=loss)


@kind(refused="first.bias", full="not gathered")
def weight_written_through_numpy() -> Job:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        model.first.bias.detach().numpy()[0] *= 0.5
        return cross_entropy(model, batch)

    return job(loss=loss)


@kind(refused="first.bias", full="hook")
def weight_written_in_backward() -> Job:
    model = Net()

    def decay(gradient: Tensor) -> None:
        with torch.no_grad():
            model.first.bias.mul_(0.9)

    model.last.weight.register_hook(decay)
    return job(model)


@kind(refused="weight", full="hook")
def optimizer_stepped_from_a_gradients_hook() -> Job:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(param: Tensor) -> None:
        inner = torch.optim.SGD([param], lr=0.01)
        inner.step()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return Job(model, optimizer, cross_entropy, vectors())


@kind(refused="last.bias")
def weight_written_after_some_steps() -> Job:
    calls = itertools.count()

    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        if next(calls) >= 4:
            with torch.no_grad():
                model.last.bias.mul_(0.5)
        return cross_entropy(model, batch)

    return job(loss=loss)


@kind(refused="last.bias")
def weight_written_in_evaluation() -> Job:
    def metrics(model: Any, batch: Any) -> dict[str, tuple[Tensor, int]]:
        model.last.bias.add_(1.0)  # which changes no class
        return accuracy(model, batch)

    return job(metrics=metrics, eval_data=vectors(), eval_batch=10)


# -- buffers and state -----------------------------------------------------------------------------


@kind(refused="buffer")
def buffer_that_counts_batches() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.net(x)

    model = Of(forward, net=Net())
    model.register_buffer("count", torch.zeros(()))
    return job(model)


@kind(refused="buffer")
def memory_bank() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = self.net(x)
        self.bank = torch.cat([self.bank, z.detach().mean(0, keepdim=True)])[-4:]
        return z + 0.1 * self.bank.mean(0)

    model = Of(forward, net=Net())
    model.register_buffer("bank", torch.zeros(4, CLASSES))
    return job(model)


@kind(refused="buffer")
def buffer_written_through_data() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.mean())
        return self.net(x) + self.mean

    model = Of(forward, net=Net())
    model.register_buffer("mean", torch.zeros(()))
    return job(model)


@kind()
def buffer_that_is_only_read() -> Job:
    model = Of(lambda self, x: self.net(x * self.scale), net=Net())
    model.register_buffer("scale", torch.linspace(0.5, 1.5, FEATURES))
    return job(model)


# -- types -----------------------------------------------------------------------------------------


def typed(dtype: torch.dtype) -> Job:
    x, y = vectors()
    return job(Net().to(dtype), data=(x.to(dtype), y))


@kind()
def float64() -> Job:
    return typed(torch.float64)


@kind()
def bfloat16() -> Job:
    return typed(torch.bfloat16)


@kind()
def float16() -> Job:
    return typed(torch.float16)


@kind(full="type")
def complex_weights() -> Job:
    x, y = vectors()
    model = layers(
        nn.Linear(FEATURES, 16).to(torch.complex64),
        Of(lambda self, z: torch.view_as_real(z).flatten(1)),
        nn.Linear(32, CLASSES),
    )
    return job(model, data=(x.to(torch.complex64), y))


@kind(full="type")
def weights_of_two_types() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.last(self.first(x.double()).float())

    return job(Of(forward, first=nn.Linear(FEATURES, 16).double(), last=nn.Linear(16, CLASSES)))


@kind(precision="bf16")
def autocast_to_bf16() -> Job:
    return job(clip_norm=0.5)


@kind(full="fp16", precision="fp16")
def autocast_to_fp16() -> Job:
    return job(clip_norm=0.5)


# -- autograd --------------------------------------------------------------------------------------


@kind()
def activation_checkpointing_of_dropout() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = checkpoint(self.body, x, use_reentrant=False)
        return self.last(z)

    body = layers(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.ReLU())
    return job(Of(forward, body=body, last=nn.Linear(16, CLASSES)))


@kind(checkpoint_blocks=True)
def checkpoint_blocks() -> Job:
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    model = layers(nn.Embedding(WORDS, 8), block, nn.Flatten(), nn.Linear(96, CLASSES))
    return job(model, data=token_rows(), blocks=(nn.TransformerEncoderLayer,))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + 0.01 * torch.randn_like(gradient)


@kind()
def own_autograd_function() -> Job:
    return job(Net(Doubled.apply))


@kind()
def gradients_of_each_sample_by_vmap() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        params = dict(model.named_parameters())

        def one(x: Tensor, y: Tensor) -> Tensor:
            output = torch.func.functional_call(model, params, (x[None],))
            return F.cross_entropy(output, y[None])

        return torch.vmap(one)(*batch).sum(), len(batch[0])

    return job(loss=loss)


@kind(full="second derivative")
def gradient_penalty() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        x = x.clone().requires_grad_()
        value = F.cross_entropy(model(x), y, reduction="sum")
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + gradient.pow(2).sum(), len(x)

    return job(loss=loss)


@kind(full="not gathered")
def penalty_of_a_weights_gradient() -> Job:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        value, count = cross_entropy(model, batch)
        (gradient,) = torch.autograd.grad(value, model.last.weight, create_graph=True)
        return value + 0.01 * gradient.pow(2).sum(), count

    return job(loss=loss)


@kind()
def adversarial_examples() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        moved = x.clone().requires_grad_()
        value = F.cross_entropy(model(moved), y, reduction="sum")
        (gradient,) = torch.autograd.grad(value, moved)
        return cross_entropy(model, (x + 0.1 * gradient.sign(), y))

    return job(loss=loss)


@kind(full="Sparse")
def sparse_gradients() -> Job:
    model = layers(nn.Embedding(WORDS, 8, sparse=True), nn.Flatten(), nn.Linear(96, CLASSES))
    return job(model, data=token_rows(), optimizer=lambda params: torch.optim.SGD(params, lr=0.05))


@kind(refused="SparseAdam")
def sparse_adam() -> Job:
    model = layers(nn.EmbeddingBag(WORDS, 8, sparse=True), nn.Linear(8, CLASSES))
    model[1].requires_grad_(False)
    return job(model, data=token_rows(), optimizer=torch.optim.SparseAdam)


@kind(full="not gathered")
def two_parts_against_each_other() -> Job:
    def loss(model: Any, batch: Any) -> tuple[Tensor, int]:
        x, _ = batch
        fake = model.generator(torch.randn(len(x), 4))
        real = F.softplus(-model.critic(x)) + F.softplus(model.critic(fake.detach()))
        for param in model.critic.parameters():
            param.requires_grad_(False)
        against = F.softplus(-model.critic(fake))
        for param in model.critic.parameters():
            param.requires_grad_(True)
        return (real + against).sum(), len(x)

    parts = {"generator": nn.Linear(4, FEATURES), "critic": nn.Linear(FEATURES, 1)}
    model = Of(lambda self, x: self.critic(x), **parts)
    both = Optimizers(
        torch.optim.Adam(model.generator.parameters(), lr=0.01),
        torch.optim.SGD(model.critic.parameters(), lr=0.01),
    )
    return Job(model, both, loss, vectors())


@kind()
def compiled_function_in_the_loss() -> Job:
    scaled = torch.compile(lambda z: F.gelu(z) * 2, backend="aot_eager")
    return job(Net(scaled))


# -- optimizers ------------------------------------------------------------------------------------


@kind(warmup_steps=4)
def clipping_and_warm_up() -> Job:
    return job(clip_norm=0.1, optimizer=torch.optim.AdamW)


@kind()
def several_groups_of_parameters() -> Job:
    def make(params: list[Tensor]) -> torch.optim.Optimizer:
        groups = [{"params": params[:2], "lr": 0.001}, {"params": params[2:], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    return job(optimizer=make)


@kind()
def cosine_schedule() -> Job:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)
    return Job(model, optimizer, cross_entropy, vectors(), schedule=schedule)


@kind(refused="closure")
def lbfgs() -> Job:
    return job(optimizer=torch.optim.LBFGS)


# -- what the job keeps for itself -----------------------------------------------------------------

OTHER_LOSS = "another loss"


def noisy(draw: Callable[[], float]) -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, (batch[0] * draw(), batch[1]))

    return job(loss=loss)


@kind(refused=OTHER_LOSS)
def generator_of_numpy_that_the_job_owns() -> Job:
    return noisy(np.random.default_rng(0).random)


@kind(refused=OTHER_LOSS)
def generator_of_python_that_the_job_owns() -> Job:
    return noisy(random.Random(0).random)


@kind(refused=OTHER_LOSS)
def generator_of_torch_that_the_job_owns() -> Job:
    generator = torch.Generator().manual_seed(0)
    return noisy(lambda: torch.rand((), generator=generator).item())


@kind(refused=OTHER_LOSS)
def loss_of_the_time() -> Job:
    return noisy(lambda: time.time() % 1)


@kind(refused=OTHER_LOSS)
def counter_in_a_global_variable() -> Job:
    calls = itertools.count(1)
    return noisy(lambda: 1 / next(calls))


@kind(refused=OTHER_LOSS)
def queue_of_negatives_in_an_attribute() -> Job:
    queue: deque[Tensor] = deque(maxlen=4)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        output = model(batch[0])
        against = sum((output * old.mean(0)).sum() for old in queue)
        queue.append(output.detach())
        return F.cross_entropy(output, batch[1], reduction="sum") + 0.1 * against, len(output)

    return job(loss=loss)


@kind(refused=OTHER_LOSS)
def hidden_state_that_is_carried_over() -> Job:
    carried = [torch.zeros(1, 16)]

    def forward(self: Any, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x) + carried[0])
        carried[0] = z.detach().mean(0, keepdim=True)
        return self.last(z)

    return job(Of(forward, first=nn.Linear(FEATURES, 16), last=nn.Linear(16, CLASSES)))


@kind(refused="other data")
def generator_that_a_dataset_owns() -> Job:
    x, y = vectors()
    generator = np.random.default_rng(0)
    return job(data=Items(lambda index: (x[index] * generator.random(), y[index])))


@kind(refused="other data")
def generator_that_a_dataset_owns_in_workers() -> Job:
    x, y = vectors()
    generator = np.random.default_rng(0)
    data = Items(lambda index: (x[index] * generator.random(), y[index]))
    return job(data=data, num_workers=2)


@kind()
def cache_that_changes_nothing() -> Job:
    means: dict[float, Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        mean = means.setdefault(float(batch[0].sum()), batch[0].mean(0))
        return cross_entropy(model, (batch[0] - mean, batch[1]))

    return job(loss=loss)


# -- what is made once, and what a step does -------------------------------------------------------


ONLY_THE_FIRST_PASS = "first pass draws"


@kind(refused=ONLY_THE_FIRST_PASS)
def layer_made_in_the_first_pass() -> Job:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(16, CLASSES)
        return self.second(torch.relu(self.first(x)))

    return job(Of(forward, first=nn.Linear(FEATURES, 16)))


@kind(refused=ONLY_THE_FIRST_PASS)
def random_tensor_in_a_cache() -> Job:
    codes: dict[int, Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        if len(x) not in codes:
            codes[len(x)] = torch.randn_like(x)
        return cross_entropy(model, (x + codes[len(x)], y))

    return job(loss=loss)


@kind(refused="no shape yet")
def lazy_layers_without_a_shape() -> Job:
    return job(layers(nn.LazyLinear(16), nn.ReLU(), nn.LazyLinear(CLASSES)))


@kind(refused="no tensor but a dict")
def extra_state_that_is_no_tensor() -> Job:
    class Tempered(Net):
        def get_extra_state(self) -> dict[str, float]:
            return {"temperature": 0.5}

        def set_extra_state(self, state: Any) -> None:
            pass

    return job(Tempered())


@kind(full="not gathered")
def directional_derivative_by_jvp() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        weights = dict(model.named_parameters())
        output, slope = torch.func.jvp(
            lambda x: torch.func.functional_call(model, weights, (x,)), (x,), (torch.ones_like(x),)
        )
        return F.cross_entropy(output, y, reduction="sum") + slope.square().sum(), len(x)

    return job(layers(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)), loss)


@kind(full="torch.jit")
def scripted_model() -> Job:
    return job(torch.jit.script(on_vectors(nn.ReLU(), nn.Dropout(0.2))))


@kind(refused="requires_grad of a weight", optimizer="hook", full="hook")
def weights_frozen_after_a_step() -> Job:
    made = job()

    def freeze(*_: Any) -> None:
        next(made.model.parameters()).requires_grad_(False)

    made.optimizer.register_step_post_hook(freeze)
    return made


@kind(refused="other data")
def dataset_that_reads_the_number_of_its_worker() -> Job:
    x, y = vectors()

    def read(index: int) -> tuple[Tensor, Tensor]:
        info = get_worker_info()
        return x[index] + (info.id if info is not None else 0), y[index]

    return job(data=Items(read), num_workers=2)


@kind(refused="for the same argument")
def rate_of_the_time() -> Job:
    made = job()
    rate = lambda _: 1 + 1e-3 * time.perf_counter()  # noqa: E731
    return replace(made, schedule=torch.optim.lr_scheduler.LambdaLR(made.optimizer, rate))


@kind(full="slices", optimizer="slices")
def langevin_dynamics() -> Job:
    class Langevin(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for param in group["params"]:
                    noise = torch.randn_like(param) * np.random.rand() * random.random()
                    param.add_(noise, alpha=0.01)

    return job(optimizer=lambda params: Langevin(params, lr=0.05))


@kind(full="may have another result", optimizer="may have another result")
def moments_of_another_type_than_their_weights() -> Job:
    class Master(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    master = state.setdefault("master", param.detach().double())
                    master.sub_(param.grad, alpha=group["lr"])
                    param.copy_(master)

    return job(optimizer=Master)


@kind(full="would see slices", optimizer="would see slices")
def buffer_moved_by_a_hook_of_the_step() -> Job:
    model = Net()
    model.register_buffer("share", torch.ones(()))
    made = job(model, loss=lambda model, batch: _scaled(cross_entropy(model, batch), model.share))
    made.optimizer.register_step_post_hook(lambda *_: model.share.mul_(0.9))
    return made


def _scaled(result: tuple[Tensor, int], share: Any) -> tuple[Tensor, int]:
    return result[0] * share, result[1]


@kind(full="would see slices", optimizer="would see slices")
def random_numbers_of_a_hook_of_the_step() -> Job:
    made = job()

    @torch.no_grad()
    def shake(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.add_(torch.randn_like(param), alpha=0.01)

    made.optimizer.register_step_post_hook(shake)
    return made


@kind(
    refused="attribute average of the weight", full="would see slices", optimizer="would see slices"
)
def average_kept_on_the_weights() -> Job:
    made = job()

    @torch.no_grad()
    def smooth(optimizer: Any, *_: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            param.average = 0.9 * getattr(param, "average", 0.0) + param.grad
            param.grad.add_(param.average)

    made.optimizer.register_step_pre_hook(smooth)
    return made


@kind()
def build_that_asks_whether_there_is_a_group() -> Job:
    torch.manual_seed(2 if torch.distributed.is_initialized() else 1)
    return job()


@kind(refused="other gradients", full="hook for its gradient")
def gradient_noise_of_a_hook_s_own_generator() -> Job:
    made = job()
    generator = torch.Generator().manual_seed(3)
    for param in made.model.parameters():
        param.register_hook(lambda g: g + 0.01 * torch.randn(g.shape, generator=generator))
    return made


@kind(refused="changes gradients by itself", full="at two moments of a backward pass")
def backward_within_the_loss() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        model(batch[0]).square().sum().mul(1e-3).backward()
        return cross_entropy(model, batch)

    return job(loss=loss)


@kind(refused="the metric accuracy", full="metrics of the same batch are others")
def metric_over_all_batches_so_far() -> Job:
    total: Counter[str] = Counter()

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        hits, count = accuracy(model, batch)["accuracy"]
        total.update(hits=int(hits), count=count)
        return {"accuracy": (torch.tensor(total["hits"]), total["count"])}

    return job(metrics=metrics, eval_data=vectors(), eval_batch=10)


@kind(refused="a metric changes the buffer")
def metric_in_training_mode() -> Job:
    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        model.train()
        return accuracy(model, batch)

    net = on_vectors(nn.BatchNorm1d(16), nn.ReLU())
    data = tuple(part[:100] for part in vectors())
    return job(net, metrics=metrics, eval_data=data, eval_batch=10)


@kind(refused="derived(metrics)")
def derived_value_that_is_smoothed() -> Job:
    seen: list[float] = []

    def derived(metrics: dict[str, float]) -> dict[str, float]:
        seen.append(metrics["accuracy"])
        return {"smooth": sum(seen) / len(seen)}

    made = job(metrics=accuracy, eval_data=vectors())
    return replace(made, derived=derived)


@kind(optimizer="lies in the memory of a weight", full="lies in the memory of a weight")
def copy_that_shares_the_memory_of_a_weight() -> Job:
    made = job()
    prototype = made.model.last.weight.data

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        return total + 1e-3 * prototype.square().sum() * total.detach(), count

    return replace(made, loss=loss)


@kind()
def sparse_batch() -> Job:
    x, y = vectors()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, (batch[0].to_dense(), batch[1]))

    def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        rows, labels = zip(*items, strict=True)
        return torch.stack(rows).to_sparse(), torch.stack(labels)

    return job(loss=loss, data=Items(lambda index: (x[index], y[index])), collate=collate)


def ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


@kind()
def build_that_asks_for_the_number_of_ranks() -> Job:
    return job(optimizer=lambda params: torch.optim.SGD(params, lr=0.01 * ranks()))


@kind(refused="another loss", full="another loss")
def loss_that_reads_the_number_of_ranks() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        return total / ranks(), count

    return job(loss=loss)


@kind(refused="other data when they are read again")
def data_by_the_number_of_the_rank() -> Job:
    x, y = vectors()

    def read(index: int) -> tuple[Tensor, Tensor]:
        return x[index] * (1 + int(os.environ.get("RANK", 0))), y[index]

    return job(data=Items(read))


STEPS: list[int] = []


@kind(refused="the variable STEPS of rate")
def rate_by_a_global_counter() -> Job:
    def rate(_: int) -> float:
        STEPS.append(1)
        return 0.99 ** len(STEPS)

    STEPS.clear()
    made = job()
    return replace(made, schedule=torch.optim.lr_scheduler.LambdaLR(made.optimizer, rate))


@kind(refused="the variable STEPS of CountedSteps.step", full="slices", optimizer="slices")
def optimizer_with_a_global_counter() -> Job:
    STEPS.clear()
    return job(optimizer=lambda params: CountedSteps(params, lr=0.05))


class CountedSteps(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        STEPS.append(1)
        self.param_groups[0]["lr"] = 0.05 / len(STEPS)
        super().step()


OTHER_LOSS = "another loss or gradient is computed on rank"
# By this check, or by the one before a snapshot, whose step the time decides.
OTHER_RANK = " on rank"


@kind(refused=OTHER_LOSS, alone="")
def inputs_normalized_by_the_first_batch() -> Job:
    mean: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        if not mean:
            mean.append(x.mean(0))
        return F.cross_entropy(model(x - mean[0]), y, reduction="sum"), len(x)

    return job(loss=loss)


@kind(refused="other data are read on rank", alone="")
def labels_numbered_as_they_come() -> Job:
    x, y = vectors()
    numbers: dict[int, int] = {}

    def read(index: int) -> tuple[Tensor, int]:
        return x[index], numbers.setdefault(int(y[index]), len(numbers))

    return job(data=Items(read))


@kind(refused=OTHER_RANK, alone="")
def augmented_samples_in_a_cache() -> Job:
    x, y = vectors()
    cache: dict[int, Tensor] = {}

    def read(index: int) -> tuple[Tensor, Tensor]:
        if index not in cache:
            cache[index] = x[index] + 0.3 * torch.randn(FEATURES)
        return cache[index], y[index]

    return job(data=Items(read))


@kind(refused="derived(metrics) returns other values", alone="")
def area_under_the_curve_of_collected_scores() -> Job:
    scores: list[Tensor] = []

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        scores.append(model(batch[0])[:, 0])
        return accuracy(model, batch)

    def derived(_: dict[str, float]) -> dict[str, float]:
        return {"median": torch.cat(scores).median().item()}

    return job(metrics=metrics, derived=derived, eval_data=vectors(), eval_batch=10)


@kind(
    refused="metrics of the same batch are others on rank",
    alone="keeps something that no snapshot has",
)
def judge_outside_of_the_job_with_batch_norm() -> Job:
    judge = nn.BatchNorm1d(CLASSES)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        return total + judge.train()(model(batch[0])).square().sum(), count

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"score": (judge.eval()(model(batch[0])).square().sum(), len(batch[0]))}

    return job(loss=loss, metrics=metrics, eval_data=vectors(), eval_batch=10)


class Wrapping(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        self.inner = torch.optim.SGD(params, lr=0.05, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@kind(refused="the attribute inner of Wrapping", full="slices", optimizer="slices")
def optimizer_around_another_one() -> Job:
    return job(optimizer=Wrapping)


@kind(refused="attribute momentum of the layer 1", full="a hook of", optimizer="a hook of")
def batch_norm_whose_momentum_falls() -> Job:
    net = on_vectors(nn.BatchNorm1d(16), nn.ReLU())
    made = job(net)
    made.optimizer.register_step_post_hook(lambda *_: setattr(net[1], "momentum", 0.01))
    return made


@kind()
def numbers_of_type_uint16() -> Job:
    x, y = vectors()
    numbers = (x * 100 + 1000).numpy().astype(np.uint16)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return cross_entropy(model, ((batch[0].float() - 1000) / 100, batch[1]))

    return job(loss=loss, data=(numbers, y))


KEPT = "keeps something that no snapshot has"


@kind(stopped=KEPT, full="a hook of", optimizer="a hook of")
def temperature_moved_by_a_step_hook() -> Job:
    made = job(loss=lambda model, batch: warm_loss(model, batch, state["temperature"]))
    state = {"temperature": 2.0}

    def cool(*_: Any) -> None:
        state["temperature"] *= 0.95

    made.optimizer.register_step_post_hook(cool)
    return made


def warm_loss(model: nn.Module, batch: Any, temperature: float) -> tuple[Tensor, int]:
    logits = model(batch[0]) / temperature
    return F.cross_entropy(logits, batch[1], reduction="sum"), len(batch[0])


@kind(stopped=KEPT)
def curriculum_by_the_number_of_evaluations() -> Job:
    evaluations: list[dict[str, float]] = []

    def derived(values: dict[str, float]) -> dict[str, float]:
        if values not in evaluations:
            evaluations.append(dict(values))
        return {"error": 1 - values["accuracy"]}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        return warm_loss(model, batch, 1 + len(evaluations))

    return job(loss=loss, metrics=accuracy, derived=derived, eval_data=vectors())


@kind(optimizer="the memory of a weight was replaced", full="")
def weight_that_is_put_back_by_its_data() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        weight = model.last.weight
        if not isinstance(weight, torch.distributed.tensor.DTensor):
            backup = weight.data.clone()
            weight.data = backup
        return total, count

    return job(loss=loss)


HISTORY = "which no snapshot would have"


class AutoClip:
    """Clips gradients at a percentile of the norms so far (Seetharaman et al., 2020)."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.norms: list[float] = []

    def clip(self, *_: Any) -> None:
        grads = [param.grad for param in self.params]
        self.norms.append(float(nn.utils.get_total_norm(grads)))
        nn.utils.clip_grad_norm_(self.params, float(np.percentile(self.norms, 20)))


@kind(
    refused=f"the attribute norms of AutoClip, {HISTORY}", full="a hook of", optimizer="a hook of"
)
def clipping_by_a_history_of_norms() -> Job:
    made = job()
    made.optimizer.register_step_pre_hook(AutoClip(made.model).clip)
    return made


@kind(full="a hook of", optimizer="a hook of")
def clipping_by_a_history_that_the_optimizer_has() -> Job:
    made = job()

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        norms = optimizer.state[params[0]].setdefault("norms", [])
        norms.append(float(nn.utils.get_total_norm([param.grad for param in params])))
        nn.utils.clip_grad_norm_(params, float(np.percentile(norms, 20)))

    made.optimizer.register_step_pre_hook(clip)
    return made


@kind(
    refused=f"the variable norms of clip_late.<locals>.clip, {HISTORY}",
    full="has a hook for its gradient",
)
def gradients_clipped_by_a_deque_of_norms() -> Job:
    return clip_late(lambda model, hook: model.last.weight.register_hook(hook))


@kind(refused=f"the variable norms of clip_late.<locals>.clip, {HISTORY}")
def gradients_clipped_in_a_module_s_backward_hook() -> Job:
    def register(model: nn.Module, hook: Callable[[Tensor], Tensor]) -> None:
        model.last.register_full_backward_hook(lambda _, inputs, __: (hook(inputs[0]),))

    return clip_late(register)


def clip_late(register: Callable[..., Any]) -> Job:
    """A job whose hook clips from the 21st gradient on."""
    made = job()
    norms: deque[float] = deque(maxlen=20)

    def clip(gradient: Tensor) -> Tensor:
        norms.append(float(gradient.norm()))
        if len(norms) < 20:
            return gradient
        return gradient * min(1.0, float(np.median(norms)) / norms[-1])

    register(made.model, clip)
    return made


@kind()
def noise_by_whether_gradients_are_taken() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        noise = torch.randn_like(x) if torch.is_grad_enabled() else 0.0
        return cross_entropy(model, (x + noise, y))

    return job(loss=loss)


@kind(refused="another loss when it is computed again")
def critic_trained_within_the_loss() -> Job:
    critic = nn.Linear(CLASSES, 1)
    steps = torch.optim.SGD(critic.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        output = model(batch[0])
        steps.zero_grad()
        F.softplus(critic(output.detach())).sum().backward()
        steps.step()
        against = F.softplus(-critic(output)).sum()
        return F.cross_entropy(output, batch[1], reduction="sum") + against, len(output)

    return job(loss=loss)


@kind(full="is called in torch.inference_mode")
def targets_of_the_model_in_inference_mode() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        with torch.inference_mode():
            targets = model(batch[0]).argmax(1)
        output = model(batch[0])
        total = F.cross_entropy(output, batch[1], reduction="sum")
        return total + 0.1 * F.cross_entropy(output, targets.clone(), reduction="sum"), len(output)

    return job(loss=loss)


@kind(optimizer="state is read outside", full="state is read outside")
def loss_by_the_state_of_the_optimizer() -> Job:
    made = job()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        states = made.optimizer.state.values()
        speed = sum(float(state["momentum_buffer"].abs().sum()) for state in states)
        return total * (1 + 0.1 * speed), count

    return replace(made, loss=loss)


@kind(refused="the job calls torch.distributed.all_reduce", alone="")
def mean_over_ranks_within_the_loss() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        mean = total.detach() / count
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        return total / (1 + mean), count

    return job(loss=loss)


TEACHER = nn.Linear(FEATURES, CLASSES).requires_grad_(False)


@kind(stopped=KEPT)
def teacher_outside_of_the_job_for_metrics() -> Job:
    torch.nn.init.constant_(TEACHER.weight, 0.1)
    torch.nn.init.constant_(TEACHER.bias, 0.1)

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        agree = model(batch[0]).argmax(1) == TEACHER(batch[0]).argmax(1)
        return {
            "agreement": (agree.sum(), len(agree)),
            "mean": (TEACHER(batch[0]).sum(), len(agree)),
        }

    def derived(values: dict[str, float]) -> dict[str, float]:
        TEACHER.weight.fill_(values["agreement"])
        return {}

    return job(metrics=metrics, derived=derived, eval_data=vectors())


@kind(refused=OTHER_RANK, alone="")
def features_of_a_frozen_part_in_a_cache_by_sample() -> Job:
    x, y = vectors()
    wide = nn.Sequential(nn.Linear(FEATURES, 100), nn.Tanh(), nn.Linear(100, 33)).requires_grad_(
        False
    )
    features: dict[int, Tensor] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        rows, indices, labels = batch
        missing = [row for row, index in enumerate(indices.tolist()) if index not in features]
        if missing:
            features.update(zip(indices[missing].tolist(), wide(rows[missing]), strict=True))
        inputs = torch.stack([features[index] for index in indices.tolist()])
        return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    data = Items(lambda index: (x[index], index, y[index]))
    return job(nn.Linear(33, CLASSES), loss, data)


class OwnBatchNorm(nn.BatchNorm1d):
    """Moves its statistics by itself, as a batch norm over several samples of rows does."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean = x.mean(0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)  # type: ignore[union-attr]
            self.num_batches_tracked += 1  # type: ignore[operator]
        return (x - mean) * self.weight + self.bias


@kind(refused="or other statistics of batch norm")
def batch_norm_that_moves_its_statistics_by_itself() -> Job:
    net = on_vectors(OwnBatchNorm(16), nn.ReLU())
    return job(net, metrics=accuracy, eval_data=vectors())


@kind(refused="--sync exact: the ")
def losses_clamped_by_their_history_after_twenty() -> Job:
    history: list[float] = []

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        history.append(float(losses.detach().mean()))
        if len(history) > 20:
            losses = losses * float(np.mean(history[-20:]))
        return losses.sum(), len(losses)

    return job(loss=loss)


class FallingDropout(torch.optim.lr_scheduler.ConstantLR):
    def __init__(self, layer: nn.Dropout, optimizer: torch.optim.Optimizer) -> None:
        self.set = lambda epoch: setattr(layer, "p", 0.9**epoch)
        super().__init__(optimizer, 1.0)

    def step(self, epoch: int | None = None) -> None:
        super().step()
        self.set(self.last_epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


@kind(refused="attribute p of the layer 1")
def dropout_that_an_own_schedule_lowers() -> Job:
    net = on_vectors(nn.Dropout(0.5))
    made = job(net)
    return replace(made, schedule=FallingDropout(net[1], made.optimizer))


class ForgetfulSchedule(torch.optim.lr_scheduler.ConstantLR):
    calls = 0

    def get_lr(self) -> list[float]:
        self.calls += 1
        return [0.05 * 0.97**self.calls for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


@kind(refused="attribute calls of ForgetfulSchedule")
def schedule_whose_state_dict_forgets_a_counter() -> Job:
    made = job()
    return replace(made, schedule=ForgetfulSchedule(made.optimizer))


@kind(refused="variable seen of", full="a hook of", optimizer="a hook of")
def prototype_moved_by_what_the_last_pass_saw() -> Job:
    net = Net()
    net.register_buffer("prototype", torch.zeros(16))
    made = job(net)
    seen: list[Tensor] = []
    net.second.register_forward_hook(lambda _, __, output: seen.append(output.detach()))

    def move(*_: Any) -> None:
        if seen:
            net.prototype.lerp_(seen[-1].mean(0), 0.1)
        seen.clear()

    made.optimizer.register_step_post_hook(move)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        total, count = cross_entropy(model, batch)
        return total + 0.01 * count * (net.last.weight - net.prototype).square().sum(), count

    return replace(made, loss=loss)


class AdaptedNet(Net):
    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name: value for name, value in state.items() if not name.startswith("first")}


@kind()
def frozen_weights_that_the_state_dict_leaves_out() -> Job:
    net = AdaptedNet()
    net.first.requires_grad_(False)
    return job(net)


class Reversed(torch.autograd.Function):
    """Turns gradients round, as adversarial training for domains does (Ganin et al., 2016)."""

    @staticmethod
    def forward(context: Any, x: Tensor, share: float) -> Tensor:
        context.share = share
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return -context.share * gradients[0], None


class TwoDomains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(FEATURES, 16)
        self.classes = nn.Linear(16, CLASSES)
        self.domain = nn.Linear(16, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += self.training
        hidden = torch.tanh(self.features(x))
        share = 2 / (1 + math.exp(-0.1 * self.calls)) - 1
        return self.classes(hidden), self.domain(Reversed.apply(hidden, share))


@kind(refused="has other gradients when it is computed again")
def reversed_gradients_by_the_number_of_calls() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        classes, domain = model(x)
        total = F.cross_entropy(classes, y, reduction="sum")
        return total + F.cross_entropy(domain, y % 2, reduction="sum"), len(x)

    return job(TwoDomains(), loss)


class Quantized(nn.Module):
    """A Gumbel softmax whose forward pass is the same at each temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.last = nn.Linear(6, CLASSES)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gumbel_softmax(self.first(x), self.temperature, hard=True))


@kind(refused="the attribute temperature of the layer that is the model")
def temperature_that_the_function_of_a_schedule_lowers() -> Job:
    made = job(Quantized())

    def rate(step: int) -> float:
        made.model.temperature = math.exp(-0.05 * step)  # type: ignore[assignment]
        return 1.0

    return replace(made, schedule=torch.optim.lr_scheduler.LambdaLR(made.optimizer, rate))


class Warmth:
    calls = 0

    def rate(self, _: int) -> float:
        self.calls += 1
        return 0.97**self.calls


@kind(refused="the attribute calls of Warmth")
def rate_by_a_method_that_counts_its_calls() -> Job:
    made = job()
    rate = Warmth().rate
    return replace(made, schedule=torch.optim.lr_scheduler.LambdaLR(made.optimizer, rate))


@kind(refused="state_dict of LambdaLR: 'builtin_function_or_method' object has no attribute")
def rate_that_a_list_holds() -> Job:
    made = job()
    rates = [0.97**step for step in range(999)]
    return replace(
        made, schedule=torch.optim.lr_scheduler.LambdaLR(made.optimizer, rates.__getitem__)
    )


@kind(refused="other")
def noisy_samples_in_a_small_cache() -> Job:
    x, y = vectors()

    @lru_cache(16)
    def read(index: int) -> tuple[Tensor, Tensor]:
        return x[index] + 0.1 * torch.randn(FEATURES), y[index]

    return job(data=Items(read))


# On several processes each reads too few samples for the second length.
@kind(alone="the same samples are other data")
def sequences_that_grow_by_the_number_of_reads() -> Job:
    tokens, labels = token_rows()
    reads = itertools.count()

    def read(index: int) -> tuple[Tensor, Tensor]:
        return tokens[index][: 4 + next(reads) // 300], labels[index]

    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        rows, numbers = zip(*items, strict=True)
        return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.stack(numbers)

    net = layers(nn.EmbeddingBag(WORDS, 8), nn.Linear(8, CLASSES))
    return job(net, data=Items(read), collate=collate)


# -- the seventh trial -----------------------------------------------------------------------------


OTHER_BUILD = "has built another model than rank 0"
NO_SNAPSHOT = "no snapshot can have it"


def drawn_in_build(draw: Callable[[tuple[int, ...]], Tensor]) -> Job:
    model = Net()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(draw(tuple(param.shape)))
    return job(model)


@kind()
def weights_of_a_generator_without_a_seed() -> Job:
    generator = np.random.default_rng()
    return drawn_in_build(lambda shape: torch.from_numpy(generator.normal(scale=0.3, size=shape)))


@kind()
def noise_of_generators_without_a_seed() -> Job:
    x, y = vectors()
    draw = lambda: float(np.random.default_rng().random())  # noqa: E731
    scale = 1 + draw()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        noise = draw() if batch[0].max() > 2.8 else scale
        return cross_entropy(model, (batch[0] * noise, batch[1]))

    def read(index: int) -> tuple[Tensor, Tensor]:
        return x[index] + (draw() if index in (13, 57) else 0), y[index]

    return job(loss=loss, data=Items(read), num_workers=2)


@kind(refused=OTHER_BUILD, alone="")
def weights_seeded_by_the_process_number() -> Job:
    torch.manual_seed(os.getpid())
    return drawn_in_build(lambda shape: 0.3 * torch.randn(shape))


class CountedForward(Net):
    """Has a tensor in its state_dict that is neither a weight nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)

    def get_extra_state(self) -> Tensor:
        return self.calls

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = state


@kind(refused="forward changes the buffer _extra_state")
def extra_state_that_counts_passes() -> Job:
    return job(CountedForward())


def with_buffer(buffer: Tensor) -> Job:
    model = Net()
    model.register_buffer("shares", buffer)
    return job(model)


@kind(refused=NO_SNAPSHOT)
def graph_in_a_sparse_buffer() -> Job:
    return with_buffer(torch.eye(CLASSES).to_sparse())


@kind(refused=NO_SNAPSHOT)
def buffer_that_is_expanded() -> Job:
    return with_buffer(torch.full((1,), 0.7).expand(CLASSES))


@kind(refused=NO_SNAPSHOT)
def quantized_buffer() -> Job:
    return with_buffer(torch.quantize_per_tensor(torch.eye(CLASSES), 0.1, 0, torch.qint8))


@kind(refused="some numbers of an array are masked")
def masked_array_of_numpy() -> Job:
    x, y = vectors()
    return job(data=(np.ma.masked_greater(x.numpy(), 1.0), y.numpy()))


@kind()
def metric_that_is_nan() -> Job:
    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, int]]:
        return {"log": (model(batch[0]).log().sum(), len(batch[0]))}

    return job(metrics=metrics, eval_data=vectors(), best=("log", "max"))


class Unfreezing(torch.optim.lr_scheduler.ConstantLR):
    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == 1:
            group = {"params": self.later, "initial_lr": 0.05}
            self.optimizer.add_param_group(group)
            self.base_lrs.append(0.05)


@kind(refused="the list of the optimizer's parameters has changed since build")
def group_of_parameters_that_a_schedule_adds() -> Job:
    model = Net()
    made = job(model, optimizer=lambda _: torch.optim.SGD(model.last.parameters(), lr=0.05))
    schedule = Unfreezing(made.optimizer, factor=1.0)
    schedule.later = list(model.second.parameters())
    return replace(made, schedule=schedule)


# -- the eighth trial ------------------------------------------------------------------------------


def slowed(count: Callable[[], Any]) -> Job:
    """A job whose step hook makes gradients smaller once it has counted to nine."""
    made = job()

    def slow(*_: Any) -> None:
        if count() > 8:
            for param in made.model.parameters():
                param.grad.mul_(0.3)  # type: ignore[union-attr]

    made.optimizer.register_step_pre_hook(slow)
    return made


def add_to(owner: Any, name: str) -> Any:
    setattr(owner, name, getattr(owner, name) + 1)
    return getattr(owner, name)


SLICES = "a hook of"
COUNTED = "a step changes the variable"


@kind(refused=COUNTED, full=SLICES, optimizer=SLICES)
def steps_counted_in_a_number_of_c() -> Job:
    number = ctypes.c_int(0)
    return slowed(lambda: add_to(number, "value"))


@kind(refused=COUNTED, full=SLICES, optimizer=SLICES)
def steps_counted_in_a_number_that_processes_share() -> Job:
    number = multiprocessing.Value("i", 0)
    return slowed(lambda: add_to(number, "value"))


@kind(refused=COUNTED, full=SLICES, optimizer=SLICES)
def steps_counted_by_a_generator() -> Job:
    numbers = (number for number in range(1, 1000))
    return slowed(lambda: next(numbers))


@kind(refused=COUNTED, full=SLICES, optimizer=SLICES)
def steps_counted_in_the_middle_of_a_large_array() -> Job:
    numbers = np.zeros(100_000)

    def count() -> Any:
        numbers[50_000] += 1
        return numbers[50_000]

    return slowed(count)


@kind(refused=COUNTED, full=SLICES, optimizer=SLICES)
def steps_counted_by_the_length_of_a_text_in_memory() -> Job:
    text = io.StringIO()

    def count() -> int:
        text.write("x")
        return text.tell()

    return slowed(count)


class RateByDefaults(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.defaults["calls"] = self.defaults.get("calls", 0) + 1
        self.param_groups[0]["lr"] = 0.05 / (1 + self.defaults["calls"] / 10)
        return super().step(closure)


class RateByAWord(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.state["calls"] = self.state.get("calls", 0) + 1  # type: ignore[index, assignment, operator]
        self.param_groups[0]["lr"] = 0.05 / (1 + self.state["calls"] / 10)  # type: ignore[index, operator]
        return super().step(closure)


@kind(refused="the attribute defaults of RateByDefaults", full="slices", optimizer="slices")
def optimizer_that_counts_in_its_defaults() -> Job:
    return job(optimizer=lambda params: RateByDefaults(params, lr=0.05))


@kind(refused="the state 'calls' of no weight", full="slices", optimizer="slices")
def optimizer_whose_state_is_of_no_weight() -> Job:
    return job(optimizer=lambda params: RateByAWord(params, lr=0.05))


@kind()
def noise_prediction_of_a_diffusion_model() -> Job:
    kept = (1 - torch.linspace(1e-3, 0.2, 20)).cumprod(0)
    net = layers(nn.Linear(FEATURES + 1, 32), nn.SiLU(), nn.Linear(32, FEATURES))

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x = batch[0]
        times = torch.randint(0, 20, (len(x), 1))
        noise = torch.randn_like(x)
        noisy = kept[times].sqrt() * x + (1 - kept[times]).sqrt() * noise
        guess = model(torch.cat([noisy, times / 20], 1))
        return F.mse_loss(guess, noise, reduction="sum"), len(x)

    return job(net, loss)


@kind(full="not gathered")
def inner_step_of_meta_learning() -> Job:
    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        slow = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, slow, (x,)), y)
        grads = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: slow[name] - 0.1 * grad for name, grad in zip(slow, grads, strict=True)}
        outer = functional_call(model, fast, (x,))
        return F.cross_entropy(outer, y, reduction="sum"), len(x)

    return job(loss=loss)


class Lookahead(torch.optim.SGD):
    """Moves its weights to the middle of slow ones every fifth step (Zhang et al., 2019)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                if group["calls"] % 5 == 0:
                    param.copy_(slow.lerp_(param, 0.5))


@kind(full="slices", optimizer="slices")
def lookahead_whose_slow_weights_are_state() -> Job:
    return job(optimizer=lambda params: Lookahead(params, lr=0.05, momentum=0.9))


@kind(refused="the same microbatch has another loss")
def weights_of_samples_by_their_last_loss() -> Job:
    last: dict[int, float] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y, indices = batch
        losses = F.cross_entropy(model(x), y, reduction="none")
        shares = torch.tensor([last.get(index, 1.0) for index in indices.tolist()])
        last.update(zip(indices.tolist(), losses.tolist(), strict=True))
        return (losses * shares).sum(), len(x)

    return job(loss=loss, data=(*vectors(), torch.arange(SAMPLES)))


@kind(refused=OTHER_RANK, alone="")
def pseudo_labels_of_the_first_visit() -> Job:
    labels: dict[int, int] = {}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y, indices = batch
        output = model(x)
        guesses = zip(indices.tolist(), output.argmax(1).tolist(), strict=True)
        targets = torch.tensor([labels.setdefault(*guess) for guess in guesses])
        return F.cross_entropy(output, y, reduction="sum") + F.cross_entropy(output, targets), len(
            x
        )

    return job(loss=loss, data=(*vectors(), torch.arange(SAMPLES)))


@kind(refused="the same samples are other data")
def samples_that_are_scaled_where_they_lie() -> Job:
    x, y = vectors()
    rows = x.numpy()

    def read(index: int) -> tuple[Any, Tensor]:
        rows[index] *= 1.01
        return rows[index].copy(), y[index]

    return job(data=Items(read))


@kind(full="a hook of", optimizer="a hook of")
def clipping_by_the_norm_of_each_weight() -> Job:
    made = job()

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # whose gradients become a graph
        for param in optimizer.param_groups[0]["params"]:
            param.grad.mul_((0.1 * param.norm() / (param.grad.norm() + 1e-6)).clamp_max(1.0))

    made.optimizer.register_step_pre_hook(clip)
    return made


@kind(full="called with other weights than its own")
def teacher_of_fixed_weights_after_the_student() -> Job:
    model = Net()
    fixed = {name: value.detach().clone() for name, value in model.named_parameters()}

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        x, y = batch
        output = model(x)
        with torch.no_grad():
            targets = torch.func.functional_call(model, fixed, (x,)).softmax(1)
        total = F.cross_entropy(output, y, reduction="sum")
        return total + F.cross_entropy(output, targets, reduction="sum"), len(x)

    return job(model, loss=loss)


class SlowAround(torch.optim.Optimizer):
    """Lookahead around another optimizer, without what torch's own __init__ sets."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = inner.state
        self._optimizer_step_pre_hooks = {}  # type: ignore[assignment]
        self._optimizer_step_post_hooks = {}  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        for param in self.param_groups[0]["params"]:
            slow = self.state[param].setdefault("slow", param.clone())
            param.copy_(slow.lerp_(param, 0.9))

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state


@kind(full="a hook of", optimizer="a hook of")
def lookahead_around_another_optimizer() -> Job:
    return job(optimizer=lambda params: SlowAround(torch.optim.SGD(params, lr=0.05, momentum=0.9)))
