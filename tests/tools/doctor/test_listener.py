"""What `doctor` measures a link with listens where the other ranks look for it, and nowhere else."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import pytest

from stepladder.tools.doctor import link


def test_on_one_machine_it_is_a_loopback_address() -> None:
    for host in ("127.0.0.1", "localhost"):
        with link.open_listener(host, is_one_machine=True) as server:
            assert server.getsockname()[0] in ("127.0.0.1", "::1")


def test_among_several_it_is_the_address_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        link, "resolve_host", lambda host: [ip_address("127.0.0.1"), ip_address("::1")]
    )
    with link.open_listener(
        "node-1", is_one_machine=False
    ) as server:  # the name leads elsewhere on other machines
        assert server.getsockname()[0] in ("0.0.0.0", "::")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but loopback")
        own_address = route.getsockname()[0]
    monkeypatch.setattr(
        link, "resolve_host", lambda host: [ip_address("127.0.1.1"), ip_address(own_address)]
    )
    with link.open_listener("node-1", is_one_machine=False) as server:
        assert server.getsockname()[0] == own_address
