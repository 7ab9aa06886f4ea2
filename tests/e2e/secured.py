"""Runs with a secret."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import zmq

from e2e import harness
from e2e.harness import Child, Peer
from zpccl.control import links
from zpccl.control.addresses import format_address
from zpccl.control.keys import new_secret, peer_keys
from zpccl.observe.logs import log_to_stderr

SECRET = new_secret()


def write_private(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


@contextlib.contextmanager
def reducing(members: list[Child]) -> Iterator[list[Child]]:
    for child in members:
        child.start(harness.reduce_until_told)
        child.note()
    yield members
    members[0].tell()
    assert len({child.value() for child in members}) == 1
    size = len(members)
    assert members[0].call(harness.attributes) == (size, size, 1, size)


def log_all(peer: Peer) -> None:
    log_to_stderr("debug")


def connect_behind(peer: Peer, relay: str, address: str, **options: Any) -> str:
    """Connects as a peer that others reach only through a relay. Returns the address at which the relay reaches it.

    Others dial all addresses of a peer, a moment apart, and take the first that answers. On a busy machine that need
    not be the relay, even though the relay comes first.
    """
    own = []

    def reachable_at(listener: socket.socket, advertise: str | None, masters: Sequence[str]) -> tuple[str, ...]:
        own.append(format_address("127.0.0.1", listener.getsockname()[1]))
        return (relay,)

    with mock.patch.object(links, "reachable_at", reachable_at):
        harness.connect(peer, address, **options)
    return own[0]


@contextlib.contextmanager
def dealer_with(address: str, options: dict[str, str]) -> Iterator[zmq.Socket[bytes]]:
    mine = peer_keys(**options)
    assert mine is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, mine.master_public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, mine.private)
        dealer.connect(f"tcp://{address}")
        yield dealer


def credentials(peer: Peer) -> tuple[bytes, bytes]:
    options = harness.loop_of(peer.comm).options
    return options.peer_id, options.token
