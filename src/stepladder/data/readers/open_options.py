"""What a caller of `open_data` sets, as readers take it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.numbers import validate_count
from stepladder.data.readers.batches import DECODE_HINT, Decode
from stepladder.data.readers.block_cache import BlockCache
from stepladder.data.readers.files import DataFile, LocalFile, is_url


@dataclass(frozen=True)
class OpenOptions:
    """The arguments of `open_data` that readers use.

    Args:
        columns: The columns to read, or None for all.
        decode: Makes a sample of the dict of a row or record.
        cache: Holds what is read over the network.
        chunk_rows: How many records are a chunk, or None for about a megabyte of them.
        block: The tokens of a sample, for files of tokens.
        dtype: The type of tokens, where their file does not say it.
        index_beside: Whether an index is written beside its file, not into the cache.
        header: The names of columns, for files that may lack a line with them.
        dtypes: Types of columns of CSV by name; if they are given, all columns are numbers.
        typed_records: From how many records the types of columns are known.
        tables_in_memory: How many row groups are kept, or None for as many as an epoch reads from.
    """

    columns: tuple[str, ...] | None = None
    decode: Decode | None = None
    cache: BlockCache = field(default_factory=BlockCache)
    chunk_rows: int | None = None
    block: int | None = None
    dtype: str | None = None
    index_beside: bool = False
    header: tuple[str, ...] | None = None
    dtypes: dict[str, np.dtype[Any]] | None = None
    typed_records: int = 256
    tables_in_memory: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_rows", "block"):
            value = getattr(self, name)
            if value is not None:
                validate_count(name, value)
        if self.decode is not None and not callable(self.decode):
            raise InputError(f"decode={self.decode!r:.40}", DECODE_HINT)

    def open_file(self, name: str) -> DataFile:
        """Open a file of this machine, or one behind a URL."""
        if not is_url(name):
            return LocalFile(Path(name))
        from stepladder.data.readers.remote import UrlFile

        return UrlFile(name, self.cache)

    def make_fingerprint(self, kind: str, files: Iterable[DataFile]) -> str | None:
        """Return a text that is another one when files, or what is read of them, have changed.

        Args:
            kind: How the files are read.
            files: The files.

        Returns:
            The text; None if there is a function `decode`, which may change unseen.
        """
        if self.decode is not None:
            return None
        settings = [kind, self.columns, None, self.block, self.dtype, self.header]
        hashed = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for file in files:
            hashed.update(os.fsencode(file.identity))
        return hashed.hexdigest()


def convert_columns(
    columns: Sequence[str] | None, argument: str = "columns"
) -> tuple[str, ...] | None:
    """Return the columns that a caller names as a tuple. Raises InputError for a text."""
    if isinstance(columns, str):
        raise InputError(f"{argument}={columns!r}", f"{argument}=[{columns!r}], a list of names")
    with as_input_error(
        f"{argument}={columns!r:.60}", f"{argument}=, a list of names", (TypeError,)
    ):
        return None if columns is None else tuple(columns)
