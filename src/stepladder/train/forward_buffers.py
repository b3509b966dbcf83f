"""A check of `--sync exact`: forward must not change buffers, apart from those of batch norm."""

from __future__ import annotations

import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.train.batch_norm import find_batch_norms
from stepladder.train.fingerprints import fingerprint


class BufferChanged(InputError):
    """Forward changes a buffer, and no rule combines its values over microbatches."""

    kind = "buffer"

    def __init__(self, buffer: str) -> None:
        self.tensor = buffer
        super().__init__(
            f"--sync exact: forward changes the buffer {buffer}, which no rule combines over"
            " microbatches",
            "make it depend on the step alone, or --sync ddp",
        )


class ForwardBuffers:
    """Detects buffers that forward changes: their values would depend on which rank ran it last."""

    def __init__(self, model: nn.Module) -> None:
        allowed = {id(buffer) for layer in find_batch_norms(model) for buffer in layer.buffers()}
        self.paths: list[tuple[str, nn.Module, str]] = []  # a buffer's path, module and name in it
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in allowed:
                    self.paths.append((f"{prefix}.{name}".lstrip("."), module, name))
        self.values = [getattr(module, name).clone() for _, module, name in self.paths]
        self.versions = self._read_versions()
        self.model = model
        self.entries = self._read_entries()

    def _read_entries(self) -> dict[str, bytes]:
        """Return hashes of what `state_dict` has besides weights and buffers."""
        known = set(map(id, (*self.model.parameters(), *self.model.buffers())))
        entries = self.model.state_dict(keep_vars=True)
        return {name: fingerprint(each) for name, each in entries.items() if id(each) not in known}

    def _read_versions(self) -> list[tuple[int, int]]:
        """Return each buffer's id and torch's count of writes, which misses writes to `.data`."""
        buffers = (module._buffers[name] for _, module, name in self.paths)
        return [(id(buffer), buffer._version if buffer is not None else 0) for buffer in buffers]

    def validate_unwritten(self) -> None:
        """Compare the values only if a buffer was written; takes 0.2 us for each buffer."""
        if self.paths and self._read_versions() != self.versions:
            self.validate_unchanged()
            self.versions = self._read_versions()

    def accept_update(self) -> None:
        """Take what the optimizer's step, or a hook of it, has written: all ranks write the same.

        Raises:
            InputError: It is a buffer that no snapshot has, or that `build` makes in another shape.
        """
        versions = self._read_versions()
        for index, (path, module, name) in enumerate(self.paths):
            if versions[index] != self.versions[index]:
                buffer = getattr(module, name)
                is_saved = name not in module._non_persistent_buffers_set
                if not is_saved or buffer.shape != self.values[index].shape:
                    what = "shape of the buffer" if is_saved else "buffer"
                    raise InputError(
                        f"a step changes the {what} {path}, which no resume would have",
                        "register_buffer without persistent=False, in its largest shape",
                    )
                self.values[index] = buffer.clone()
        self.versions = versions
        if self.entries:
            self.entries = self._read_entries()

    def validate_unchanged(self) -> None:
        """Compare the values of all buffers with those at the beginning.

        Raises:
            BufferChanged: A buffer has changed.
        """
        for (path, module, name), value in zip(self.paths, self.values, strict=True):
            buffer = module._buffers[name]
            if buffer is None or not torch.equal(buffer, value):
                raise BufferChanged(path)
        for name, entry in self._read_entries().items() if self.entries else ():
            if self.entries[name] != entry:
                raise BufferChanged(name)
