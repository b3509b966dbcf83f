"""Random numbers that are drawn for samples: by the data set, or between a batch and its forward
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import wrap
from stepladder.tools.check.probe.recorder import here

FUNCTIONS = (
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "bernoulli",
    "normal",
    "multinomial",
)
METHODS = ("uniform_", "normal_", "bernoulli_", "random_")
MOST = 40


class Drawn:
    fetches: dict[int, int] = {}  # noqa: RUF012
    draws: dict[str, int] = {}  # noqa: RUF012


def attach() -> None:
    wrap(fetch._MapDatasetFetcher, "fetch", fetched)
    for name in FUNCTIONS:
        wrap(torch, name, draw(name))
    for name in METHODS:
        wrap(torch.Tensor, name, draw(name))


def draw(name: str) -> Any:
    def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = here()
        if not recorder.direct():
            return original(*args, **kwargs)
        frame = recorder.frame()
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else ""
        count = Drawn.draws[place] = Drawn.draws.get(place, 0) + 1
        if count <= MOST:
            generator = kwargs.get("generator")
            state = (
                digests.state_of(generator)
                if generator is not None
                else digests.digest(torch.get_rng_state())
            )
            recorder.at("draw", fn=name, state=state, own=generator is not None)
        return original(*args, **kwargs)

    return around


def fetched(original: Any, fetcher: Any, indices: Any) -> Any:
    count = Drawn.fetches[id(fetcher)] = Drawn.fetches.get(id(fetcher), 0) + 1
    if count > 4:
        return original(fetcher, indices)
    before = states(fetcher.dataset)
    batch = original(fetcher, indices)
    after = states(fetcher.dataset)
    used = {name: state for name, state in before.items() if after.get(name) != state}
    info = get_worker_info()
    number = list(indices)[:64] if isinstance(indices, (list, tuple)) else [indices]
    here().write(
        "fetch",
        indices=number,
        used=used,
        worker=info.id if info else -1,
        count=count,
        at=place_of(fetcher.dataset),
    )
    return batch


def states(dataset: Any) -> dict[str, str]:
    return digests.random_states() | digests.generators(dataset)


def place_of(dataset: Any) -> Any:
    """Where the data set's class reads a sample."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    if code is None or not here().is_users(code.co_filename):
        return None
    return [code.co_filename, code.co_firstlineno, "__getitem__"]
