"""The precisions of --precision: fp32, bf16, and fp16 with a scaled loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def make_autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return the context in which a loss is computed in a precision."""
    dtype = AUTOCAST_DTYPES.get(precision)
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype)


def make_scaler(precision: str, device: torch.device) -> torch.amp.GradScaler:
    """Return what scales the loss, so that small gradients do not vanish; enabled for fp16."""
    return torch.amp.GradScaler(device.type, enabled=precision == "fp16")
