"""A mirror on 127.0.0.1 that can misbehave in every way a real one does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class Reply:
    """What the server does for one request."""

    body: bytes = b""
    status: int = 200
    cut: int | None = None  # close the connection after this many bytes of the answer's body
    length: bool = True  # send Content-Length
    location: str | None = None
    stall: bool = False  # send the headers, then nothing until the test ends


class Mirror(ThreadingHTTPServer):
    """Answers each path with its replies in turn; the last one is repeated."""

    daemon_threads = False  # so that server_close waits for every answer

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replies: dict[str, list[Reply]] = {}
        self.requests: list[str] = []
        self.ended = threading.Event()

    def serve(self, path: str, *replies: Reply) -> str:
        """Plan the replies for path; the URL to ask."""
        self.replies[path] = list(replies)
        return self.url(path)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def next_reply(self, path: str) -> Reply:
        replies = self.replies.get(path, [Reply(status=404)])
        return replies.pop(0) if len(replies) > 1 else replies[0]


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        reply = self.server.next_reply(self.path)
        self.send_response(reply.status)
        if reply.location:
            self.send_header("Location", reply.location)
        if reply.length:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body[: reply.cut])
        if reply.stall:
            self.wfile.flush()
            self.server.ended.wait(30)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Mirror()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def reply() -> type[Reply]:
    return Reply
