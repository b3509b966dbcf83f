"""The protocol of a data source that a user brings: a length, chunk edges, and reading by index."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stepladder.core.errors import InputError
from stepladder.core.numbers import read_env_number
from stepladder.core.order import Chunks, IndexArray
from stepladder.rank.exit_record import identify_start

CHUNKS_IN_MEMORY = 64  # from which an epoch reads at once; the others wait
FUNCTION_OF = "the function of "  # begins the name of an entry of contents that is of no file
EDGES_HINT = "increasing whole numbers, from 0 to the number of samples; or None"


@runtime_checkable
class Source(Protocol):
    """Data that is read by index; give an object with these three members as a job's data.

    `stepladder.testing.check_source` tests whether an object keeps this contract.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    @property
    def chunk_edges(self) -> Sequence[int] | NDArray[np.int64] | None:
        """The first sample of each chunk, then the number of samples; None if any order is fast.

        Samples of one chunk are fast to read together, such as those of a file. An epoch reads from
        at most 64 chunks at a time: a source that keeps so many in memory reads most chunks once.
        """
        ...

    def read(self, indices: NDArray[np.int64]) -> Any:
        """Return the batch of these samples, in this order.

        A sample must not depend on the batch in which it is read, nor on what was read before. Only
        one thread at a time calls this method, and not the one that trains.

        Args:
            indices: The samples, shape (n,).

        Returns:
            A tensor or an array with a row for each sample, or a list or dict of them.
        """
        ...


def is_source(data: Any) -> bool:
    """Return whether an object has the members of Source."""
    return isinstance(data, Source) and not isinstance(data, type)


def get_contents(data: Any) -> list[list[str]] | None:
    """Return the name and a hash of each file of data, and keys of functions; None without any."""
    contents: list[list[str]] | None = getattr(data, "contents", None)
    return contents


def make_chunks(source: Source) -> Chunks | None:
    """Return the chunks of a source; None if it has none.

    Raises:
        InputError: The edges are not those of chunks.
    """  # noqa: DOC501 - edges_error makes an InputError
    if source.chunk_edges is None:
        return None
    edges: IndexArray = np.asarray(source.chunk_edges)
    num_samples = len(source)
    is_list_of_integers = edges.ndim == 1 and len(edges) > 0 and edges.dtype.kind in "iu"
    if not is_list_of_integers or edges[0] != 0 or edges[-1] != num_samples:
        raise _edges_error(source, f"do not lead from 0 to {num_samples}")
    if (edges[1:] <= edges[:-1]).any():
        raise _edges_error(source, "do not increase")
    runs: list[tuple[int, int]] = []  # of chunks of one size, of which the last may be shorter
    for size in np.diff(edges).tolist():
        rows, chunk_rows = runs[-1] if runs else (0, 0)
        continues_run = size <= chunk_rows and rows % chunk_rows == 0
        if continues_run:
            runs[-1] = (rows + size, chunk_rows)
        else:
            runs.append((size, size))
    slots: int = getattr(source, "chunks_in_memory", CHUNKS_IN_MEMORY)
    return Chunks(tuple(runs), slots)


def _edges_error(source: Source, problem: str) -> InputError:
    return InputError(f"the chunk_edges of the job's {type(source).__name__} {problem}", EDGES_HINT)


def validate_same_files(stored: Any, current: list[list[str]] | None, owner: str) -> None:
    """Validate that the files of data, and the functions on them, are those of an earlier start.

    Args:
        stored: The name and the hash of each file then, and the key of each function; None if they
            were not stored.
        current: The same now, in the same order. The names may be others, as of a moved folder.
        owner: What was begun with them, for the message.

    Raises:
        InputError: There is another number of files, or one has other contents; or a function has
            another key, or none and no launcher has restarted the same code.
    """
    if not isinstance(stored, list) or current is None:
        return
    if not any(_is_function(entry) for entry in stored):  # as before functions were compared
        current = [entry for entry in current if not _is_function(entry)]
    hint = f"the files and keys that {owner} was begun with"
    if len(stored) != len(current):
        raise InputError(f"{owner} has {len(stored)} files of data, now {len(current)}", hint)
    for (name, digest), entry in zip(current, stored, strict=True):
        if _is_function([name]) and not digest and not _is_restart():
            problem = f"{name} has no key, and may be another than {owner} was begun with"
            raise InputError(problem, f'{name.removeprefix(FUNCTION_OF)}(..., key="v1")')
        if _is_function(entry) and entry[-1] == "":  # the user vouches for it now
            continue
        if not isinstance(entry, list) or entry[-1:] != [digest]:
            raise InputError(f"{name} has other contents than {owner} was begun with", hint)


def _is_function(entry: Any) -> bool:
    """Return whether an entry of contents is about a function, not a file."""
    return isinstance(entry, list) and FUNCTION_OF in str(entry[:1])


def _is_restart() -> bool:
    """Return whether the launcher or Slurm has started these ranks again, without a person."""
    restarts = read_env_number(os.environ, "TORCHELASTIC_RESTART_COUNT", 0)
    return restarts > 0 or identify_start()["restart"] > 0


def describe_missing_keys(contents: Iterable[list[list[str]] | None]) -> str:
    """Return a line about functions of data without a key; "" if there are none."""
    names = [name for entries in contents for name, key in entries or () if not key]
    return f"  {names[0]} has no key: this run cannot be resumed without one" if names else ""
