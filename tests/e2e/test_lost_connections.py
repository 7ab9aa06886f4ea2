"""Links whose connections are reset while calls run: no call fails, and the connections come back."""

from __future__ import annotations

import ctypes
import random
import socket
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e import harness
from e2e.harness import LOCAL_PREFIX, Peer, cluster, until
from e2e.secured import SECRET, write_private
from zpccl.engine.engine import Engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CONNECTIONS = 4
ELEMENTS = 2 << 20
BREAKS = 8


def data_sockets(peer: Peer, master_port: int) -> dict[Any, list[socket.socket]]:
    """Copies of the sockets of the links that this process dialled, by address of the other end."""
    found: dict[Any, list[socket.socket]] = defaultdict(list)
    listening = {address.rpartition(":")[2] for address in harness.loop_of(peer.comm).options.addresses}
    for copy, own, other in harness.stream_sockets():
        if copy.family == socket.AF_UNIX:
            is_dialled = other[: len(LOCAL_PREFIX)] == LOCAL_PREFIX
        else:
            is_dialled = other[1] != master_port and str(own[1]) not in listening
        if is_dialled:
            found[other].append(copy)
        else:
            copy.close()
    return found


def reset(connection: socket.socket) -> None:
    """Ends a connection. Bytes in flight are lost, over TCP in both directions."""
    if connection.family == socket.AF_UNIX:
        return connection.shutdown(socket.SHUT_RDWR)
    unspecified = (ctypes.c_uint16 * 8)(socket.AF_UNSPEC)
    assert ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), unspecified, 16) == 0, ctypes.get_errno()


def states(peer: Peer) -> list[Any]:
    """The states of all links of this peer."""
    return harness.link_facts(peer.comm, Engine.link_state)


def are_whole(peer: Peer) -> bool:
    return all(state.open_count == CONNECTIONS for state in states(peer))


def break_connections(peer: Peer, seed: int, master_port: int) -> None:
    """Breaks some connections of a link, never all, again and again; each time it waits until all are back."""
    choose = random.Random(seed)
    for _ in range(BREAKS):
        until(lambda: are_whole(peer), "all connections")
        before, links = peer.lost_connections(), data_sockets(peer, master_port)
        link = choose.choice(sorted(links))
        for connection in choose.sample(links[link], choose.randint(1, CONNECTIONS - 1)):
            reset(connection)
        for connection in (connection for sockets in links.values() for connection in sockets):
            connection.close()
        until(lambda before=before: peer.lost_connections() > before, "the loss of a connection")  # type: ignore[misc]
    until(lambda: are_whole(peer), "all connections")


def reduce_while_they_break(peer: Peer, master_port: int | None, in_place: bool) -> dict[str, Any]:
    """Reduces until the peer that knows the master's port has broken connections often enough. No call may fail."""
    threads = ThreadPoolExecutor(1)
    breaker = threads.submit(break_connections, peer, 7, master_port) if master_port else None
    rounds, is_over = 0, False
    while not is_over:
        rounds += 1
        send = np.full(ELEMENTS, peer.comm.rank + 1, np.float32)
        send[1:] += np.arange(ELEMENTS - 1, dtype=np.float32) % 1000
        send[0] = breaker is not None and breaker.done()
        recv = send if in_place else np.empty_like(send)
        peer.comm.all_reduce(send, recv)
        size = peer.comm.world_size
        expected = size * (size + 1) / 2 + size * (np.arange(ELEMENTS - 1, dtype=np.float32) % 1000)
        assert np.array_equal(recv[1:], expected), "S1"
        is_over = recv[0] > 0
    if breaker is not None:
        breaker.result()
    return {"rounds": rounds, "states": states(peer), "epoch": peer.comm.epoch}


@pytest.mark.parametrize(("in_place", "local"), [(True, False), (False, False), (True, True), (False, True)])
def test_reduces_go_on_while_connections_break(in_place: bool, local: bool, tmp_path: Path) -> None:
    """S1: the last peer dialled both its links, so it breaks them and dials again. In place, the run has a secret."""
    options: dict[str, Any] = {"connections": CONNECTIONS, "local_sockets": local}
    options |= {"secret": SECRET} if in_place else {}
    arguments = ("--secret-file", write_private(tmp_path / "secret", SECRET)) if in_place else ()
    with cluster(*arguments) as run:
        children = run.members(2, **options)
        children.append(run.newcomer(children, **options))
        epoch, port = children[0].call(harness.view)[0], int(run.master.address.rpartition(":")[2])
        for child in children:
            child.start(reduce_while_they_break, port if child is children[-1] else None, in_place)
        facts = [child.value(90) for child in children]
        assert len({fact["rounds"] for fact in facts}) == 1
        assert {fact["epoch"] for fact in facts} == {epoch}, "nobody was lost"
        broken = facts[-1]["states"]
        assert sum(state.lost_count for state in broken) >= BREAKS
        assert all(state.open_count == CONNECTIONS for state in broken)
