"""S7 with real processes: strangers are refused and logged, and meanwhile no member is disturbed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import zpccl
from e2e import harness
from e2e.delays import FarPath
from e2e.harness import Child, Cluster, Peer, cluster, loop_of, until
from e2e.secured import SECRET, credentials, dealer_with, log_all, reducing, write_private
from e2e.strangers import GARBAGE, GREETING, READY, is_dropped, raw, receive, server
from zpccl import limits
from zpccl.control import keys, master_loop, zap
from zpccl.control.keys import new_private_key, new_secret, public_key_of
from zpccl.control.links import NewLink
from zpccl.errors import Result
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.messages import Hello, Kick, Refusal, Refused, Welcome, encode

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A run of two members with a secret. The secret must not appear in any log."""
    file = write_private(tmp_path_factory.mktemp("secret") / "secret", SECRET)
    with cluster("--secret-file", file) as run:
        for child in run.members(2, secret=SECRET):
            child.call(log_all)
        yield run
        for process in [run.master, *run.children]:
            log = process.log.read_text()
            for secret in secrets_of(SECRET):
                assert secret not in log


def secrets_of(secret: str) -> list[str]:
    master, peer = keys.master_keys(secret), keys.peer_keys(secret)
    assert master is not None and peer is not None
    privates = [master.private.decode(), peer.private.decode()]
    return [secret[4:20], *privates, repr(master.link_seed)[2:-1], master.link_seed.hex()]


@pytest.fixture
def busy(run: Cluster) -> Iterator[list[Child]]:
    """Two members that reduce while the test goes on. No reduce may fail."""
    with reducing(run.children[:2]) as members:
        yield members


def sync(peer: Peer, value: float) -> float:
    weights = np.full(50_000, value)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
    peer.comm.sync_shared_state(state)
    assert (weights == weights[0]).all()
    return float(weights[0])


# --- The secret of a run ----------------------------------------------------------------------------------------------


def test_a_run_with_a_secret_works(tmp_path: Path) -> None:
    with cluster("--secret-file", write_private(tmp_path / "secret", SECRET)) as run:
        members = run.members(2, secret=SECRET)
        newcomer = run.newcomer(members, secret=SECRET)
        members.append(newcomer)
        for index, child in enumerate(members):
            child.start(harness.reduce, np.full(10_000, float(index), np.float32))
        assert all((child.value() == 3.0).all() for child in members)
        for index, child in enumerate(members):
            child.start(sync, float(index))
        assert len({child.value() for child in members}) == 1


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "another secret": ({"secret": new_secret()}, "its secret or key differs"),
    "no secret": ({}, "this peer has none"),
}


@pytest.mark.parametrize("attempts", [1, 5])
@pytest.mark.parametrize("what", OTHERS)
def test_who_has_not_the_secret_is_told_so(run: Cluster, busy: list[Child], what: str, attempts: int) -> None:
    """At once: the peer does not try again, as it does if nobody answers."""
    options, text = OTHERS[what]
    before = run.master.log.read_text().count("refused ")
    comm = zpccl.Communicator(run.master.address, **options)
    with pytest.raises(zpccl.AuthenticationFailed, match=text) as caught:
        comm.connect(attempts)
    assert caught.value.result == Result.MASTER_CONNECTION_FAILED and caught.value.address == run.master.address
    until(lambda: run.master.log.read_text().count("refused ") > before, "the log of it")


def test_a_secret_where_the_master_has_none() -> None:
    with zpccl.MasterNode("127.0.0.1:0") as master:
        comm = zpccl.Communicator(master.address, secret=SECRET)
        with pytest.raises(zpccl.AuthenticationFailed, match="the master there has none"):
            comm.connect()
        with zpccl.Communicator(master.address) as other:
            assert other.world_size == 1


class CutOnce(FarPath):
    """Ends the first connection, as a master does that is stopped and started again at once."""

    has_cut = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.has_cut:
            return await super()._serve(reader, writer)
        self.has_cut = True
        return writer.close()


def test_a_newcomer_whose_master_is_restarted_within_the_handshake() -> None:
    """L3: the newcomer must not conclude that the run has another secret."""
    with zpccl.MasterNode("127.0.0.1:0", secret=SECRET, recovery_grace=0.05) as master:
        path = CutOnce(master.address)
        try:
            with contextlib.closing(zpccl.Communicator(path.address, secret=SECRET)) as comm:
                comm.connect(1)
                assert path.has_cut and comm.world_size == 1
        finally:
            path.close()


def test_who_is_refused_may_try_again_with_the_secret(run: Cluster) -> None:
    child = run.child()
    assert child.fails(harness.connect, run.master.address).kind == "AuthenticationFailed"
    with reducing(run.children[:2]):
        child.start(harness.connect, run.master.address, secret=SECRET)
        until(lambda: run.master.log.read_text().count("registered for group 0") > 2, "its registration")
    child.dispose()
    run.children.remove(child)
    until(lambda: "pending peer" in run.master.log.read_text(), "its loss")


def test_the_secret_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_SECRET", SECRET)
    with zpccl.MasterNode("127.0.0.1:0") as master, zpccl.Communicator(master.address) as comm:
        assert comm.world_size == 1
        monkeypatch.delenv("ZPCCL_SECRET")
        with pytest.raises(zpccl.AuthenticationFailed):
            zpccl.Communicator(master.address).connect()


HELLO = encode(Hello(b"?" * 16, b"?" * 16, False, 0, "intruder", ("127.0.0.1:1",)))
INTRUSIONS = {
    **GARBAGE,
    "a peer without a mechanism": GREETING + READY + b"\x00" + bytes([len(HELLO)]) + HELLO,
    "a peer of ZMTP 2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x00" + bytes([len(HELLO)]) + HELLO,
    "a peer of ZMTP 1.0": b"\x01\x00" + bytes([len(HELLO) + 1]) + b"\x00" + HELLO,
    "CURVE, then no handshake": GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32) + READY + b"\x00\x03abc",
}


@pytest.mark.parametrize("what", INTRUSIONS)
def test_no_bytes_get_past_the_door(run: Cluster, busy: list[Child], what: str) -> None:
    before = run.master.log.read_text()
    with raw(run.master.address) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(INTRUSIONS[what])
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        assert is_dropped(connection)
    new = run.master.log.read_text()[len(before) :]
    assert "intruder" not in new and "malformed" not in new


# --- Keys of one's own ------------------------------------------------------------------------------------------------


class Partners:
    """A master's key, the keys of peers, and the list of allowed keys."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.master = new_private_key()
        self.keys = {name: new_private_key() for name in names}
        self.file = directory / "allow"
        self.allow(*names)
        self.arguments = ["--secret-file", write_private(directory / "master", self.master), "--allow", str(self.file)]

    def allow(self, *names: str) -> None:
        self.file.write_text("".join(f"{public_key_of(self.keys[name])} {name}\n" for name in names))

    def options(self, name: str) -> dict[str, str]:
        return {"secret": self.keys[name], "master_key": public_key_of(self.master)}


def join_as(run: Cluster, partners: Partners, *names: str) -> list[Child]:
    children = [run.child() for _ in names]
    for child, name in zip(children, names, strict=True):
        child.start(harness.join, run.master.address, len(names), name=name, **partners.options(name))
    for child in children:
        child.value()
    return children


def test_partners_with_keys_of_their_own(tmp_path: Path) -> None:
    """A key is unknown, removed, and allowed again, while the others go on reducing."""
    partners = Partners(tmp_path, "alice", "bob", "carol")
    with cluster(*partners.arguments) as run:
        alice, bob, carol = join_as(run, partners, "alice", "bob", "carol")
        with reducing([alice, bob, carol]):
            partners.keys["mallory"] = new_private_key()
            stranger = run.child()
            refused = stranger.fails(harness.connect, run.master.address, **partners.options("mallory"))
            assert refused.kind == "AuthenticationFailed" and "allow list" in refused.text
            name = public_key_of(partners.keys["mallory"])
            until(lambda: f"{name} is not allowed" in run.master.log.read_text(), "the log of it")
            wrong_master = {**partners.options("bob"), "master_key": name}
            assert stranger.fails(harness.connect, run.master.address, **wrong_master).kind == "AuthenticationFailed"
        partners.allow("alice", "bob")
        for child in (alice, bob):
            child.start(reduce_in_spite_of_losses)
            child.note()
        carol.start(wait_until_closed)
        run.master.signal(signal.SIGHUP)
        assert "carol" in carol.value()
        refused = carol.fails(harness.connect, run.master.address, **partners.options("carol"))
        assert refused.kind == "AuthenticationFailed" and "allow list" in refused.text
        alice.tell()
        assert alice.value() == bob.value() == 2
        partners.allow("alice", "bob", "carol")
        run.master.signal(signal.SIGHUP)
        until(
            lambda: "3 keys are allowed now" in run.master.log.read_text().rpartition("no longer: carol")[2], "a reload"
        )
        carol.start(harness.connect, run.master.address, **partners.options("carol"))
        for child in (alice, bob):
            child.start(harness.admit, 3)
        for child in (alice, bob, carol):
            child.value()
        with reducing([alice, bob, carol]):
            pass


def test_a_list_that_is_wrong_changes_nothing(tmp_path: Path) -> None:
    partners = Partners(tmp_path, "alice", "bob")
    with cluster(*partners.arguments) as run:
        members = join_as(run, partners, "alice", "bob")
        with reducing(members):
            partners.file.write_text("zpp_nonsense alice\n")
            run.master.signal(signal.SIGHUP)
            until(lambda: "the old one stays in force" in run.master.log.read_text(), "the log of it")


def test_a_partner_cannot_pass_for_another(tmp_path: Path) -> None:
    """Bob has an allowed key. He also knows everything that Alice ever sent: her id and the token of her session."""
    partners = Partners(tmp_path, "alice", "bob")
    with cluster(*partners.arguments) as run:
        members = join_as(run, partners, "alice", "bob")
        peer_id, token = members[0].call(credentials)
        with reducing(members), dealer_with(run.master.address, partners.options("bob")) as impostor:
            impostor.send(encode(Hello(peer_id, token, True, 0, "alice", (), 100)))
            assert receive(impostor) == Refused(Refusal.MALFORMED, "its peer id belongs to another key")


def test_a_removed_key_is_not_heard_on_its_old_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq cannot close the connection. Messages from while the key was not allowed do not count later either."""
    caplog.set_level(logging.INFO, "zpccl.master")
    partners = Partners(tmp_path, "alice", "bob")
    heard: list[str] = []

    def identity_of(frame: zmq.Frame) -> str:
        heard.append(zap.identity_of(frame))
        return heard[-1]

    monkeypatch.setattr(master_loop, "identity_of", identity_of)

    def id_of_bob(number: int) -> bytes:
        return make_peer_id(public_key_of(partners.keys["bob"]), bytes([number] * SALT_BYTES))

    def hello(number: int) -> bytes:
        return encode(Hello(id_of_bob(number), b"t" * 16, False, 0, "bob", ("127.0.0.1:1",)))

    with (
        zpccl.MasterNode("127.0.0.1:0", secret=partners.master, allow=partners.file) as master,
        dealer_with(master.address, partners.options("bob")) as bob,
    ):
        bob.send(hello(1))
        until(lambda: isinstance(receive(bob), Welcome), "the end of the recovery")
        partners.allow("alice")
        master.reload()
        until(lambda: isinstance(receive(bob), Kick), "the news of the removal")
        before = len(heard)
        bob.send(hello(2))
        until(lambda: len(heard) > before, "the arrival of the message")
        partners.allow("alice", "bob")
        master.reload()
        bob.send(hello(3))
        assert isinstance(receive(bob), Welcome)
    assert len(set(heard)) == 1 and caplog.text.count("bob registered") == 2


def test_a_link_that_comes_too_late_is_closed() -> None:
    """S7: its other end may have been removed during the end of the handshake."""
    with zpccl.MasterNode("127.0.0.1:0") as master, zpccl.Communicator(master.address) as comm:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.settimeout(harness.HANG_SECONDS)
            loop_of(comm)._on_link(NewLink(b"?" * 16, 1, [theirs], None))  # As the broker does, but a moment too late.
            assert ours.recv(1) == b""


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "secret"])
def test_a_server_that_breaks_the_protocol_does_not_hang_connect(secret: str | None) -> None:
    """L1: libzmq gives up on such a server; the peer still makes all its tries."""
    mechanism = b"NULL" if secret is None else b"CURVE"
    greeting = GREETING[:12] + mechanism.ljust(20, b"\0") + GREETING[32:]
    with server(greeting + b"\x04\x06\x05WRONG", closes=False) as address:
        comm = zpccl.Communicator(address, secret=secret)
        with pytest.raises(zpccl.MasterUnreachable) as caught:
            comm.connect(2)
        assert isinstance(caught.value, zpccl.AuthenticationFailed) == (secret is not None)


def reduce_in_spite_of_losses(peer: Peer) -> int:
    """Reduces until any member is told to stop, and repeats calls that a loss costs. Returns the world size."""
    send = np.zeros(10_000, np.float32)
    peer.note("reducing")
    told = False
    while True:
        told = told or peer.is_told()
        send[:] = told
        with contextlib.suppress(zpccl.PeerLost):
            if peer.comm.all_reduce(send, op=zpccl.ReduceOp.MAX)[0]:
                return peer.comm.world_size


def wait_until_closed(peer: Peer) -> str:
    """Reduces until this peer is removed. Returns the text of the error."""
    while True:
        try:
            peer.comm.all_reduce(np.zeros(10_000, np.float32), op=zpccl.ReduceOp.MAX)
        except zpccl.PeerLost:
            continue
        except zpccl.Kicked as error:
            return str(error)


def test_a_flood_of_strangers_fills_no_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """B1: many refused connections give a bounded number of log lines, and members are not disturbed."""
    monkeypatch.setattr(limits, "REFUSALS_LOGGED_MAX", 5)
    with (
        zpccl.MasterNode("127.0.0.1:0", secret=SECRET) as master,
        zpccl.Communicator(master.address, secret=SECRET) as comm,
    ):
        for _ in range(50):
            with raw(master.address) as connection:
                connection.sendall(GREETING)
                assert is_dropped(connection)
        assert comm.are_peers_pending() is False
    lines = sum(record.getMessage().startswith("refused ") for record in caplog.records)
    assert 5 <= lines <= 10  # A new minute may have begun.
