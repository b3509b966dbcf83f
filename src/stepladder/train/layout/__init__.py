"""The layouts of a job's weights, gradients and optimizer state on the ranks.

A layout is chosen by `LAYOUTS` in core/settings.py. Each is imported when it is asked for, since
torch's DTensor takes a second.
"""

from __future__ import annotations

from importlib import import_module

from stepladder.core.settings import LAYOUTS, Settings
from stepladder.train.layout.base import StateLayout


def find_layout(settings: Settings) -> type[StateLayout]:
    """Return the class that the settings ask for, on however many ranks."""
    entry = LAYOUTS[settings.shard, settings.shard_copies]
    module_name, class_name = entry.path.split(".")
    module = import_module(f"{__name__}.{module_name}")
    layout: type[StateLayout] = getattr(module, class_name)
    return layout
