"""Networks for tests (tools/networks.py), and what their kernels tell of connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from networks import Namespaces, Network, NetworkUnavailable, counter

from e2e import harness


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Network]:
    """A network of so many hosts. The test is skipped where there can be none."""
    try:
        network = Network(count)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        yield network


def wait_for_resends(network: Namespaces, host: int, count: int) -> None:
    """Waits until TCP on a host has sent so many segments again: each one longer in vain than the one before."""
    before = network.run(host, lambda: counter("Tcp", "RetransSegs"))
    harness.until(
        lambda: network.run(host, lambda: counter("Tcp", "RetransSegs")) >= before + count, f"{count} segments again"
    )
