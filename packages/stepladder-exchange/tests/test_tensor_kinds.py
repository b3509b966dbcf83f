"""Each kind of tensor in each collective, on 2 ranks: what gloo does, done by shared memory too.

A group goes on after a call that it refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stepladder_exchange
from exchange_ranks import run_ranks

assert stepladder_exchange  # registers the back end
TIMEOUT = timedelta(seconds=20)


def inference(rank: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.arange(4.0) + rank


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "plain": lambda rank: torch.arange(4.0) + rank,
    "expanded": lambda rank: torch.full((1,), 1.0 + rank).expand(4),
    "expanded rows": lambda rank: (torch.arange(2.0) + rank).expand(2, 2),
    "overlapping": lambda rank: (torch.arange(3.0) + rank).as_strided((2, 2), (1, 1)),
    "turned": lambda rank: (torch.arange(4.0).view(2, 2) + rank).t(),
    "every second": lambda rank: (torch.arange(8.0) + rank)[::2],
    "columns": lambda rank: (torch.arange(8.0).view(2, 4) + rank)[:, :2],
    "channels last": lambda rank: (torch.arange(16.0).view(1, 2, 2, 4) + rank).to(
        memory_format=torch.channels_last
    ),
    "empty": lambda rank: torch.empty(0),
    "empty rows": lambda rank: torch.empty(2, 0),
    "one number": lambda rank: torch.tensor(3.0 + rank),
    "requires grad": lambda rank: (torch.arange(4.0) + rank).requires_grad_(),
    "of a graph": lambda rank: (torch.arange(4.0) + rank).requires_grad_() * 2,
    "inference": inference,
    "conjugate": lambda rank: torch.complex(torch.arange(4.0), torch.arange(4.0) + rank).conj(),
    "negative": lambda rank: torch.complex(torch.arange(4.0), torch.arange(4.0) + rank).conj().imag,
    "complex64": lambda rank: torch.complex(torch.arange(4.0), torch.arange(4.0) + rank),
    "complex128": lambda rank: torch.complex(torch.arange(4.0), torch.arange(4.0) + rank).cdouble(),
    "sparse": lambda rank: (torch.eye(2) * (rank + 1)).to_sparse(),
    "bool": lambda rank: torch.tensor([rank == 0, True, False, rank == 1]),
    "hidden bytes": lambda rank: torch.tensor([2 + rank, 1, 0, 7], dtype=torch.uint8).view(torch.bool),
    "nan": lambda rank: torch.tensor([float("nan") if rank == 0 else 1.0, 2.0, 3.0, float("nan") if rank else 0.0]),
    "zeros": lambda rank: torch.tensor([0.0, -0.0]) if rank else torch.tensor([-0.0, 0.0]),
    "quantized": lambda rank: torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.quint8),
    **{
        str(dtype).removeprefix("torch."): lambda rank, dtype=dtype: (
            (torch.arange(4) + rank).float().to(dtype)
        )
        for dtype in (
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16),
            *(torch.float8_e4m3fn, torch.float8_e5m2),
        )
    },
}  # fmt: skip


def reduce_by(name: str) -> Callable[[torch.Tensor, Any], Any]:
    def reduce(tensor: torch.Tensor, group: Any) -> Any:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group)
        return tensor

    return reduce


def broadcast(tensor: torch.Tensor, group: Any) -> Any:
    dist.broadcast(tensor, 0, group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Any) -> Any:
    outputs = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(outputs, tensor, group)
    return outputs


def all_gather_into(tensor: torch.Tensor, group: Any) -> Any:
    output = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
    dist.all_gather_into_tensor(output, tensor, group)
    return output


def reduce_scatter(tensor: torch.Tensor, group: Any) -> Any:
    output = torch.zeros(tensor.numel() // 2, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(output, tensor, group=group)
    return output


def all_to_all(tensor: torch.Tensor, group: Any) -> Any:
    output = torch.zeros_like(tensor)
    dist.all_to_all_single(output, tensor, group=group)
    return output


def reduce_to_first(tensor: torch.Tensor, group: Any) -> Any:
    dist.reduce(tensor, 0, group=group)
    return tensor if dist.get_rank() == 0 else None


def gather(tensor: torch.Tensor, group: Any) -> Any:
    outputs = [torch.zeros_like(tensor) for _ in range(2)] if dist.get_rank() == 0 else None
    dist.gather(tensor, outputs, 0, group)
    return outputs


def scatter(tensor: torch.Tensor, group: Any) -> Any:
    output = torch.zeros_like(tensor)
    dist.scatter(output, [tensor, tensor] if dist.get_rank() == 0 else None, 0, group)
    return output


def send(tensor: torch.Tensor, group: Any) -> Any:
    if dist.get_rank() == 0:
        dist.send(tensor, 1, group)
        return None
    output = torch.zeros_like(tensor)
    dist.recv(output, 0, group)
    return output


COLLECTIVES = {
    **{name: reduce_by(name) for name in ("SUM", "MIN", "MAX", "PRODUCT", "AVG", "BOR")},
    **{
        function.__name__: function
        for function in (broadcast, all_gather, all_gather_into, reduce_scatter, all_to_all)
    },
    **{function.__name__: function for function in (reduce_to_first, gather, scatter, send)},
}


def show(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.is_quantized:
            value = value.int_repr()
        value = value.detach().resolve_conj().resolve_neg()
        if value.dtype.is_complex:
            value = torch.view_as_real(value)
        return tuple(value.shape), value.contiguous().reshape(-1).view(
            torch.uint8
        ).tolist() if value.numel() else []
    return [show(item) for item in value] if isinstance(value, list) else value


# What gloo does otherwise; docs/exchange.md says it.
IN_MEMORY_ORDER = ("every second", "columns", "negative")  # it takes the memory as it lies there
HIDDEN = ("all_gather", "all_gather_into", "gather", "reduce_scatter")  # it sets such bytes to 1
OF_GLOO = {
    *((kind, name) for kind in IN_MEMORY_ORDER for name in COLLECTIVES),
    *(("hidden bytes", name) for name in HIDDEN),
    ("bool", "reduce_scatter"),
    ("conjugate", "reduce_to_first"),  # refused at the call here, as all_reduce is by both
    ("overlapping", "AVG"),  # it divides the shared numbers twice
    *((kind, "scatter") for kind in ("expanded", "expanded rows", "overlapping")),  # beyond its end
}
# These end a group, a rank or the wait of a peer on gloo too: one rank alone is refused.
REFUSED_ON_ONE_RANK = {
    ("one number", "reduce_scatter"),
    ("conjugate", "scatter"),
    *((kind, "send") for kind in KINDS if kind != "plain"),
}


def compare(kinds: list[str]) -> list[Any]:
    groups = [dist.new_group(backend=name, timeout=TIMEOUT) for name in ("stepladder", "gloo")]
    results: list[Any] = []
    for kind in kinds:
        for name, collective in COLLECTIVES.items():
            if (kind, name) in REFUSED_ON_ONE_RANK:
                continue
            outcomes: list[Any] = []
            for group in groups:
                try:
                    outcomes.append(show(collective(KINDS[kind](dist.get_rank()), group)))
                except Exception as error:
                    outcomes.append(error.with_traceback(None))
            results.append((kind, name, *outcomes))
        after = torch.ones(1)
        dist.all_reduce(after, group=groups[0])
        assert after.item() == 2, kind
    return [
        (
            kind,
            name,
            str(ours),
            str(theirs),
            isinstance(ours, Exception),
            isinstance(theirs, Exception),
        )
        for kind, name, ours, theirs in results
    ]


@pytest.mark.parametrize(
    "kinds",
    [["plain", "expanded", "expanded rows", "inference", "bool", "nan", "columns"], list(KINDS)],
    ids=["some", "all"],
)
def test_each_kind_of_tensor_is_exchanged_as_by_gloo(kinds: list[str]) -> None:
    for rows in run_ranks(compare, 2, kinds):
        for kind, name, ours, theirs, ours_failed, gloo_failed in rows:
            if not gloo_failed and (kind, name) not in OF_GLOO:
                assert (ours, ours_failed) == (theirs, False), (kind, name)
