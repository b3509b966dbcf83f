"""Forward passes of whole models, wrappers around them, and what is loaded into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Wrapper

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import careful, wrap
from stepladder.tools.check.probe.recorder import here

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
SHARDED = ("FSDPModule",)


class Roots:
    """Models that were called from outside of any module, and whose call is under way."""

    depth = 0
    seen: dict[int, Any] = {}  # noqa: RUF012
    names: dict[int, str] = {}  # noqa: RUF012  # of parameters, by id
    calls = 0
    evaluated = 0  # the model of the last call, by id, if that kept no graph


def attach() -> None:
    wrap(nn.Module, "__call__", call)
    wrap(Wrapper, "__init__", built)
    wrap(nn.Module, "load_state_dict", loaded)
    wrap(nn.Module, "eval", turned_off)
    wrap(nn.Module, "zero_grad", cleared)


def turned_off(original: Any, module: Any) -> Any:
    if here().direct():
        here().at("eval", module=id(module))
    return original(module)


def cleared(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    if here().direct():
        here().at("zero", optimizer=-1)
    return original(module, *args, **kwargs)


def call(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    # What the probe computes of the inputs would become a part of the trace.
    is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if Roots.depth or is_traced:
        return original(module, *args, **kwargs)
    Roots.depth += 1
    try:
        if Roots.seen.get(id(module)) is not module:
            register(module)
        if has_parameters(module):
            enter(module, args, kwargs)
        return original(module, *args, **kwargs)
    finally:
        Roots.depth -= 1


def has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def register(module: Any) -> None:
    """Names of its parameters, without what wrappers put before them."""
    Roots.seen[id(module)] = module
    for name, parameter in module.named_parameters():
        known = Roots.names.get(id(parameter))
        name = name.replace("module.", "", 1) if type(module).__name__ in WRAPPERS else name
        Roots.names[id(parameter)] = known or name.replace("_orig_mod.", "")


def name_of(parameter: Any) -> str:
    if id(parameter) not in Roots.names:
        for module in list(Roots.seen.values()):
            register(module)
    return Roots.names.get(id(parameter), "")


def enter(module: Any, args: Any, kwargs: Any) -> None:
    Roots.calls += 1
    grad = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    count = digests.size_of([args, kwargs])
    fields: dict[str, Any] = {
        "root": id(module),
        "class": type(module).__name__,
        "grad": grad,
        "size": count,
    }
    fields |= {"training": module.training, "wrapped": wrapped(module)}
    if grad and (Roots.calls <= 40 or Roots.calls % 16 == 0):
        fields["rows"] = digests.rows([args, kwargs])[:64]
        fields |= modes(module)
        fields["states"] = digests.random_states()
    if not grad and Roots.evaluated != id(module):
        fields |= modes(module) | {"weights": digests.whole(module)}
    Roots.evaluated = 0 if grad else id(module)
    if isinstance(module, Wrapper):
        fields["sync"] = module.require_backward_grad_sync
    here().at("forward", **fields)


def wrapped(module: Any) -> str:
    """The kind of wrapper that averages its gradients, or nothing."""
    kinds = [cls.__name__ for cls in type(module).__mro__]
    return next((kind for kind in kinds if kind in WRAPPERS or kind in SHARDED), "")


@careful(dict)
def modes(module: Any) -> dict[str, Any]:
    """Layers that train and evaluate differently: how many, how many of them train; batch norms by
    themselves.
    """
    layers = [
        m
        for m in module.modules()
        if isinstance(m, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm))
    ]
    norms = [m for m in layers if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    own = [
        m
        for m in norms
        if not isinstance(m, nn.SyncBatchNorm) and m.training and m.track_running_stats
    ]
    drops = [m for m in layers if m not in norms and m.training and getattr(m, "p", 0) > 0]
    live = [m for m in norms if m.training]
    return {
        "live": len(live) + len(drops),
        "moded": len(layers),
        "moded_on": sum(m.training for m in layers),
        "norms": len(own),
        "drops": len(drops),
    }


def built(original: Any, wrapper: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    done = original(wrapper, module, *args, **kwargs)
    register(wrapper)
    parameters = {
        name_of(p): [id(p), digests.digest(p)] for p in module.parameters() if p.requires_grad
    }
    here().at(
        "ddp",
        root=id(wrapper),
        inner=id(module),
        parameters=parameters,
        ids=str(kwargs.get("device_ids")),
        buffers=bool(wrapper.broadcast_buffers),
        unused=bool(wrapper.find_unused_parameters),
        library=not here().direct(),
    )
    return done


def loaded(original: Any, module: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    if Roots.depth == 0:
        own, given = set(module.state_dict()), set(state)
        strict = args[0] if args else kwargs.get("strict", True)
        fields = {
            "root": id(module),
            "class": type(module).__name__,
            "strict": strict,
            "wrapped": wrapped(module),
        }
        fields |= {"own": len(own), "given": len(given), "common": len(own & given)}
        fields["more"] = (
            len({key.removeprefix("module.") for key in given} & own) if not own & given else 0
        )
        fields["fewer"] = len({f"module.{key}" for key in given} & own) if not own & given else 0
        here().at("loadsd", **fields)
    return original(module, state, *args, **kwargs)
