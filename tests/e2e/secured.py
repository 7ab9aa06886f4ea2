"""Runs with a secret."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import zmq

from e2e import harness
from e2e.harness import Child, Peer
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


def addresses(peer: Peer) -> tuple[str, ...]:
    loop = peer.comm._loop
    assert loop is not None
    return loop.options.addresses


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
    loop = peer.comm._loop
    assert loop is not None
    return loop.options.peer_id, loop.options.token
