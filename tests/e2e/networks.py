"""Networks for tests (tools/networks.py), and TCP counters of their hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from networks import Namespaces, Network, NetworkUnavailable, counter

from e2e import harness


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Network]:
    """A network of `count` hosts. Skips the test if this process cannot make one."""
    try:
        network = Network(count)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        yield network


def wait_for_resends(network: Namespaces, host: int, count: int) -> None:
    """Waits until TCP on a host has retransmitted `count` segments; its timeout grows with each."""
    before = network.run(host, lambda: counter("Tcp", "RetransSegs"))
    harness.until(
        lambda: network.run(host, lambda: counter("Tcp", "RetransSegs")) >= before + count, f"{count} segments again"
    )
