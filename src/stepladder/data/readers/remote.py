"""Files behind a URL, read in blocks through fsspec and kept in a cache on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError, StorageFault, get_reason
from stepladder.data.local_files import make_change_error
from stepladder.data.readers.block_cache import BLOCK_BYTES, BlockCache
from stepladder.data.readers.files import shorten

ATTEMPTS = 5
REQUESTS_AT_ONCE = 16  # whose answers, of a megabyte each, are in memory
FIRST_DELAY_S = 0.2  # doubled after each attempt
HTTP_CONNECT_TIMEOUT_S = 10
HTTP_READ_TIMEOUT_S = 30  # without a byte
RETRIED_STATUSES = (408, 425, 429)  # of those that name the client as the cause
GONE_STATUSES = (404, 410)
CHANGED_STATUS = 412  # If-Match does not hold
PLAIN_BYTES = {"Accept-Encoding": "identity"}
INSTALL_HINT = "pip install 'stepladder[http]'"


def _get_file_system(url: str) -> Any:
    """Return the file system of fsspec's for a URL.

    Raises:
        InputError: A library for it is missing, or it is no URL of HTTP.
    """
    protocol = url.split("://")[0]
    if protocol not in ("http", "https"):
        raise InputError(f"{url}: only http:// and https:// are read", "copy it to a folder")
    try:
        return _make_file_system(protocol, os.getpid())
    except ImportError as error:
        raise InputError(f"{url}: {get_reason(error)}", INSTALL_HINT) from error


@lru_cache
def _make_file_system(protocol: str, process: int) -> Any:
    """Return a file system of this process, which another one must not inherit by a fork."""
    import fsspec  # an extra, as aiohttp for HTTP

    return fsspec.filesystem(protocol, skip_instance_cache=True, **_make_http_options())


def _make_http_options() -> dict[str, Any]:
    """Return what fsspec needs so that a silent server is an error, not an endless wait."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=HTTP_CONNECT_TIMEOUT_S, sock_read=HTTP_READ_TIMEOUT_S
    )
    return {"client_kwargs": {"timeout": timeout, "trust_env": True}, "headers": PLAIN_BYTES}


def list_urls(url: str) -> list[str]:
    """Return the files that a URL names: itself, or what matches its pattern or is in its folder.

    Raises:
        InputError: There are none.
    """
    if "*" in url:
        found = _call_again(url, lambda: _get_file_system(url).glob(url))
    elif url.endswith("/"):
        found = _call_again(url, lambda: _get_file_system(url).find(url))
    else:
        found = [url]
    if not found:
        raise InputError(f"the server lists nothing at {url}", "the URLs of the files, in a list")
    return sorted(found)


class UrlFile:
    """A file behind a URL. Its blocks are fetched once, as long as the cache holds them."""

    def __init__(self, url: str, cache: BlockCache) -> None:
        self.name = url
        self.cache = cache
        info = _call_again(url, lambda: _get_file_system(url).info(url))
        if info.get("size") is None:
            raise InputError(f"{url}: the server does not say its size", "copy it to a folder")
        self.size = int(info["size"])
        self.etag: str = info.get("ETag") or ""
        version = self.etag or info.get("Last-Modified") or info.get("mtime") or ""
        self.identity = f"{url} {self.size} {version}"
        self.key = shorten(self.identity)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end).

        Args:
            begin: The first byte.
            end: The byte after the last one.

        Raises:
            InputError: The file has fewer, has changed since it was opened, or is gone.
            StorageFault: The server does not answer.
        """
        if not 0 <= begin <= end <= self.size:
            raise InputError(f"{self.name} has {self.size:,} bytes, not {end:,}", "copy it again")
        if begin == end:
            return b""
        first = begin // BLOCK_BYTES
        numbers = list(range(first, (end - 1) // BLOCK_BYTES + 1))
        blocks = self.cache.read_blocks(self.key, numbers, self._fetch)
        offset = first * BLOCK_BYTES
        if len(blocks) == 1:
            return bytes(blocks[0][begin - offset : end - offset])
        last_end = end - numbers[-1] * BLOCK_BYTES
        return b"".join([blocks[0][begin - offset :], *blocks[1:-1], blocks[-1][:last_end]])

    def read_parts(self, begins: list[int], ends: list[int]) -> list[bytes]:
        """Return the bytes of several parts, whose blocks are fetched several at once."""
        numbers: set[int] = set()
        for begin, end in zip(begins, ends, strict=True):
            numbers.update(range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)))
        ordered = sorted(numbers)
        for first in range(0, len(ordered), REQUESTS_AT_ONCE):
            part = ordered[first : first + REQUESTS_AT_ONCE]
            self.cache.read_blocks(self.key, part, self._fetch)
        return [self.read(begin, end) for begin, end in zip(begins, ends, strict=True)]

    def get_path(self) -> Path:
        """Return where the cache has a copy of the whole file, for libraries that open paths.

        Raises:
            InputError: The file is larger than the cache, has changed since it was opened, or is no
                longer on its server.
            StorageFault: The server does not answer.
        """
        if self.size > self.cache.max_bytes:
            raise InputError(
                f"{self.name} has {self.size:,} bytes, and its library reads a copy of the whole"
                f" file in the cache, of {self.cache.max_bytes:,} bytes",
                f"cache_bytes={self.size} or more",
            )
        return self.cache.keep_whole(self.key, self._fetch_all)

    def _fetch_all(self) -> Iterator[bytes]:
        """Yield all blocks of the file from the server."""
        count = -(-self.size // BLOCK_BYTES)
        for first in range(0, count, REQUESTS_AT_ONCE):
            yield from self._fetch(list(range(first, min(first + REQUESTS_AT_ONCE, count))))

    def _fetch(self, numbers: list[int]) -> list[bytes]:
        """Return the bytes of blocks from the server, several at once."""
        begins = [number * BLOCK_BYTES for number in numbers]
        ends = [min(begin + BLOCK_BYTES, self.size) for begin in begins]
        parts: dict[int, bytes] = {}

        def fetch_rest() -> None:
            missing = [place for place in range(len(begins)) if place not in parts]
            answers = _get_file_system(self.name).cat_ranges(
                [self.name] * len(missing),
                [begins[place] for place in missing],
                [ends[place] for place in missing],
                on_error="return",
                **self._conditions(),
            )
            for place, answer in zip(missing, answers, strict=True):
                if isinstance(answer, Exception):
                    raise answer
                self._validate(answer, ends[place] - begins[place])
                parts[place] = answer

        _call_again(self.name, fetch_rest)
        return [parts[place] for place in range(len(begins))]

    def _conditions(self) -> dict[str, Any]:
        """Return the headers by which a server refuses to send a part of another version."""
        is_strong = self.etag and not self.etag.startswith("W/")
        return {"headers": PLAIN_BYTES | {"If-Match": self.etag}} if is_strong else {}

    def _validate(self, answer: bytes, length: int) -> None:
        if len(answer) > length:
            raise InputError(
                f"{self.name}: the server sends the whole file in place of a part",
                "a server that answers Range requests; or copy the file to a folder",
            )
        if len(answer) < length:
            raise OSError(f"{len(answer):,} bytes came instead of {length:,}")


def _call_again(name: str, call: Any) -> Any:
    """Return what a call of a server returns; it is repeated after errors that may pass.

    Args:
        name: The URL, for messages.
        call: A function without arguments.

    Raises:
        InputError: The server refuses.
        StorageFault: The last attempt failed too.
    """
    delay = FIRST_DELAY_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except (InputError, StorageFault):
            raise
        except Exception as error:  # of aiohttp, asyncio, the system, or another library
            _raise_final(name, error)
            if attempt == ATTEMPTS:
                reason = get_reason(_find_cause(error))
                message = f"{name} cannot be read, {ATTEMPTS} attempts: {reason}"
                raise StorageFault(message) from error
        time.sleep(delay)
        delay *= 2


def _find_cause(error: Exception) -> Exception:
    """Return what happened.

    fsspec raises FileNotFoundError for any error, such as a refused connection.
    """
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _raise_final(name: str, error: Exception) -> None:
    """Raise InputError for an error that another attempt would meet too."""
    cause = _find_cause(error)
    status = getattr(cause, "status", 0)
    if isinstance(cause, FileNotFoundError) or status in GONE_STATUSES:
        raise InputError(f"there is no {name}", "a URL of a file") from error
    if status == CHANGED_STATUS:
        raise make_change_error(name) from error
    if 400 <= status < 500 and status not in RETRIED_STATUSES:
        reason = str(getattr(cause, "message", "")).partition(":")[0]  # which the answer follows
        problem = f"{name}: HTTP {status} {reason}"
        raise InputError(problem, "a URL that can be read without a login") from error
    if isinstance(cause, (PermissionError, NotImplementedError)):
        raise InputError(f"{name}: {get_reason(cause)}", "copy it to a folder") from error
