"""Which keys a CURVE server admits, with libzmq itself."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from zpccl import limits
from zpccl.control.inflow import Duplicates
from zpccl.control.keys import MasterKeys, PeerKeys, master_keys, new_secret, peer_keys, public_text
from zpccl.control.zap import ENDPOINT, HandshakeWatch, ZapHandler, identity_of, secure
from zpccl.observe.logs import RefusalLog

logger = logging.getLogger("zpccl.test")
WAIT_MS = 30_000
ENDS = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
)


@pytest.fixture
def both() -> tuple[MasterKeys, PeerKeys]:
    secret = new_secret()
    master, peer = master_keys(secret), peer_keys(secret)
    assert master is not None and peer is not None
    return master, peer


@contextlib.contextmanager
def server(keys: MasterKeys, *, has_handler: bool = True) -> Iterator[tuple[zmq.Socket[bytes], ZapHandler | None, str]]:
    with zmq.Context() as context:
        handler = ZapHandler(context, keys.allowed, RefusalLog(logger)) if has_handler else None
        with context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            secure(router, keys)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            try:
                yield router, handler, f"tcp://127.0.0.1:{port}"
            finally:
                if handler is not None:
                    handler.close()


@contextlib.contextmanager
def client(endpoint: str, public: bytes, private: bytes, server_public: bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, private)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, server_public)
        dealer.connect(endpoint)
        yield dealer


def next_event(monitor: zmq.Socket[bytes], *kinds: int) -> int:
    while monitor.poll(WAIT_MS):
        kind = recv_monitor_message(monitor)["event"]
        if kind in kinds:
            return int(kind)
    raise AssertionError("no such event")


def test_the_right_key_is_let_in_and_names_its_messages(both: tuple[MasterKeys, PeerKeys]) -> None:
    master, peer = both
    with (
        server(master) as (router, handler, endpoint),
        client(endpoint, peer.public, peer.private, master.public) as me,
    ):
        me.send(b"hello")
        assert handler is not None and handler.socket.poll(WAIT_MS), "libzmq asks before it lets anybody in"
        handler.serve(0)
        assert router.poll(WAIT_MS)
        frame = router.recv_multipart(copy=False)[-1]
        assert frame.bytes == b"hello"
        assert identity_of(frame) == public_text(z85.decode(peer.public))


def test_another_key_is_refused_though_it_knows_the_servers(
    both: tuple[MasterKeys, PeerKeys], caplog: pytest.LogCaptureFixture
) -> None:
    """S7: libzmq would admit it if it asked no handler."""
    master, _ = both
    public, private = zmq.curve_keypair()
    with (
        server(master) as (router, handler, endpoint),
        client(endpoint, public, private, master.public) as stranger,
        stranger.get_monitor_socket(sum(ENDS)) as monitor,
    ):
        stranger.send(b"let me in")
        assert handler is not None and handler.socket.poll(WAIT_MS)
        handler.serve(0)
        assert next_event(monitor, *ENDS) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert not router.poll(0)
        stranger.disable_monitor()
    assert "refused 127.0.0.1" in caplog.text and public_text(z85.decode(public)) in caplog.text


def test_nobody_is_let_in_while_there_is_no_handler(both: tuple[MasterKeys, PeerKeys]) -> None:
    """S7: the server fails closed. It refuses the right key too, and the log says so."""
    master, peer = both
    with (
        server(master, has_handler=False) as (router, _, endpoint),
        router.get_monitor_socket(sum(ENDS)) as monitor,
        client(endpoint, peer.public, peer.private, master.public) as me,
    ):
        me.send(b"let me in")
        assert next_event(monitor, *ENDS) == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        assert not router.poll(0)
        router.disable_monitor()


def test_questions_that_are_not_about_this_server_are_refused(both: tuple[MasterKeys, PeerKeys]) -> None:
    master, peer = both
    key = z85.decode(peer.public)
    good = [b"1.0", b"7", b"zpccl", b"127.0.0.1", b"", b"CURVE", key]
    bad = [
        [*good[:2], b"other", *good[3:]],
        [b"2.0", *good[1:]],
        [*good[:5], b"PLAIN", b"name", b"password"],
        [*good[:5], b"NULL"],
        [*good[:6], key[:-1]],
        [*good, b"more"],
        [b"1.0"],
    ]
    with zmq.Context() as context:
        handler = ZapHandler(context, master.allowed, RefusalLog(logger))
        with context.socket(zmq.REQ) as asker:
            asker.connect(ENDPOINT)
            for request, status in [(good, b"200"), *((request, b"400") for request in bad)]:
                asker.send_multipart(request)
                handler.serve(0)
                version, _, answer, *_, name, metadata = asker.recv_multipart()
                assert (version, answer, metadata) == (b"1.0", status, b"")
                assert bool(name) == (status == b"200")
        handler.close()


def test_a_flood_of_questions_does_not_keep_the_master(
    both: tuple[MasterKeys, PeerKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B1: the loop serves members between the questions, and no question is lost."""
    monkeypatch.setattr(limits, "POLL_EVENTS_MAX", 3)
    with zmq.Context() as context:
        handler = ZapHandler(context, both[0].allowed, RefusalLog(logger))
        with context.socket(zmq.DEALER) as asker:
            asker.connect(ENDPOINT)
            for number in range(5):
                asker.send_multipart([b"", b"1.0", b"%d" % number])
            answers: list[bytes] = []
            for expected in (3, 5):
                assert handler.socket.poll(WAIT_MS)
                handler.serve(0)
                while len(answers) < expected:
                    answers.append(asker.recv_multipart()[2])
                assert not asker.poll(0)
        handler.close()
    assert answers == [b"0", b"1", b"2", b"3", b"4"]


def test_the_log_of_refusals_is_bounded_and_says_how_many_more(caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(logger)
    for _ in range(limits.REFUSALS_LOGGED_MAX + 5):
        log.add("somebody", 10)
    assert len(caplog.records) == limits.REFUSALS_LOGGED_MAX
    caplog.clear()
    log.add("somebody else", 10 + limits.REFUSALS_LOGGED_INTERVAL_NS)
    assert [record.getMessage() for record in caplog.records] == [
        "5 more lines before this one were left out",
        "refused somebody else",
    ]


def test_the_watch_names_who_failed_and_forgets_who_went(caplog: pytest.LogCaptureFixture) -> None:
    duplicates = Duplicates()
    watch = HandshakeWatch(RefusalLog(logger), duplicates)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as theirs:
        ours, (_, port) = listener.accept()[0], theirs.getsockname()
        with ours:
            watch.take(zmq.EVENT_ACCEPTED, ours.fileno(), 0)
            for _ in range(2):
                watch.take(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, 0)
                watch.take(zmq.EVENT_DISCONNECTED, ours.fileno(), 0)
    watch.take(zmq.EVENT_ACCEPTED, 10**6, 0)  # A descriptor that is already closed.
    watch.take(zmq.EVENT_DISCONNECTED, 10**6, 0)
    duplicates.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"refused {address}: it has no secret, or is not a peer"
        for address in (f"127.0.0.1:{port}", "an unknown address")
    ]
