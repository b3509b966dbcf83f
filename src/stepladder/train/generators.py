"""The random generators that torch draws from on a device."""

from __future__ import annotations

import torch


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that models on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the host and of a device; torch.manual_seed takes a millisecond."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
