"""Measures a master that coordinates many peers: time, CPU and memory of one round of votes.

The master is a real zpccl-master. The peers are lightweight: each is a DEALER socket over loopback that speaks the
protocol but moves no tensors. They report links to all others. All of them are in this process, which serves them one
after the other. So the time of a round includes the work of this process; the CPU time of the master does not.

One round is one all-reduce of all peers: N votes, N plans, N reports, N decisions. A batch is a round of --batch
collectives, for which a peer sends all votes in one message, as `all_reduce_multiple_with_retry` does.

Memory is the growth of the resident set of a process divided by the number of peers. `resident_kib_per_peer` is that of
the master. `greeted_kib_per_peer` is that of a bare socket with the master's options after one message per peer.
`bare_kib_per_peer` is that of the bare socket after as many messages, of the same sizes, as a typical peer exchanges
with the master: ZeroMQ's own memory. `own_kib_per_peer` is the difference between the master and `bare`.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import zmq
from common import Row, Rows, WorkerFailed, add, positive, spread, whole
from workers import Master, Worker, ended_workers, process_cpu_ns

from benchmarks.scenario import Column, Scenario, plain, times
from zpccl import limits
from zpccl.control.master_loop import open_router
from zpccl.protocol.messages import (
    CollectiveSpec,
    Decision,
    Hello,
    Kick,
    Linked,
    MasterMessage,
    PeerMessage,
    Plan,
    Refused,
    Report,
    TopologyKind,
    TopologySpec,
    Vote,
    Votes,
    Welcome,
    Withdraw,
    decode_master_message,
    encode,
)

WAIT_MS = 120_000
"""Timeout for an answer of the master."""
SPARE_DESCRIPTORS = 256
DESCRIPTORS_PER_PEER = 3
"""Descriptors per peer: the ZeroMQ socket, its connection, and a spare one."""


def memory_bytes(pid: int) -> int:
    """Resident anonymous memory of a process, without its program files."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == "RssAnon":
            return int(value.split()[0]) * 1024
    raise WorkerFailed(f"process {pid} is gone")


def allow_descriptors(count: int) -> None:
    """Raises the limit of open descriptors of this process to the maximum; its children inherit it.

    Raises:
        WorkerFailed: fewer than `count` are allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        raise WorkerFailed(f"{count} open descriptors are needed and {hard} allowed; see `ulimit -Hn`")
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


class LightPeer:
    """One lightweight peer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int, address: str) -> None:
        self.peer_id = number.to_bytes(2, "big") + secrets.token_bytes(14)
        self.name = f"peer-{number}"
        self._next_call_id = 1
        self.sent_bytes: list[int] = []
        self.received_bytes: list[int] = []
        """Sizes of all messages so far."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.socket.connect(f"tcp://{address}")

    def send(self, message: PeerMessage) -> None:
        """Sends to the master."""
        data = encode(message)
        self.sent_bytes.append(len(data))
        self.socket.send(data)

    def call_ids(self, count: int) -> range:
        """New ids of calls."""
        first, self._next_call_id = self._next_call_id, self._next_call_id + count
        return range(first, self._next_call_id)

    def receive(self, kind: type[MasterMessage]) -> MasterMessage:
        """The next message of a kind. Skips messages about neighbours and members.

        Raises:
            WorkerFailed: the master does not answer, or sends an unexpected message.
        """
        while True:
            try:
                data = self.socket.recv()
            except zmq.Again as error:
                raise WorkerFailed(f"{self.name} got no {kind.__name__}") from error
            self.received_bytes.append(len(data))
            message = decode_master_message(data)
            if isinstance(message, kind):
                return message
            if isinstance(message, (Plan, Decision, Kick)):
                raise WorkerFailed(f"{self.name} got {message} where a {kind.__name__} was expected")


class Crowd:
    """All peers of a run.

    Args:
        address: of the master.
        count: peers, 2 or more.
    """

    def __init__(self, address: str, count: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 8)
        self.peers: list[LightPeer] = []
        self._address, self._count = address, count

    def join(self) -> None:
        """Registers all peers and has them admitted, in groups of at most PENDING_PEERS_MAX."""
        self._register(1)
        rounds = 0
        while len(self.peers) < self._count:
            members = list(self.peers)
            self._register(min(limits.PENDING_PEERS_MAX, self._count - len(members)))
            linked, joiners = Linked(tuple(peer.peer_id for peer in self.peers)), self.peers[len(members) :]
            for peer in members:
                peer.send(linked)
            for peer in joiners:
                peer.send(linked)
                peer.send(Withdraw(0))
            for peer in joiners:
                peer.receive(Refused)  # The answer shows that the master has read their links.
            for peer in members:
                (call_id,) = peer.call_ids(1)
                peer.send(Votes(call_id, (Vote(call_id, TopologySpec(TopologyKind.UPDATE, rounds)),)))
            rounds += 1
            admitted = {peer.receive(Decision).value for peer in members}  # type: ignore[union-attr]
            if admitted != {len(joiners)}:
                raise WorkerFailed(f"{admitted} peers were admitted")

    def send_all(self, sizes: Sequence[int]) -> None:
        """Each peer sends meaningless messages of these sizes."""
        for size in sizes:
            for peer in self.peers:
                peer.socket.send(bytes(size))

    def receive_all(self, count: int) -> None:
        """Each peer receives `count` meaningless messages."""
        for _ in range(count):
            for peer in self.peers:
                peer.socket.recv()

    def connect(self, count: int) -> list[LightPeer]:
        """Connects `count` more peers."""
        first = len(self.peers)
        for number in range(first, first + count):
            self.peers.append(LightPeer(self._context, number, self._address))
        return self.peers[first:]

    def _register(self, count: int) -> None:
        joiners = self.connect(count)
        for peer in joiners:
            peer.send(Hello(peer.peer_id, secrets.token_bytes(16), False, 0, peer.name, ("127.0.0.1:48149",), 1))
        for peer in joiners:
            peer.receive(Welcome)

    def reduce(self, batch: int) -> tuple[float, float]:
        """One round; returns the seconds from the first and from the last vote to the last decision."""
        specs = [CollectiveSpec(tag, 1024, 10, 0, 0, 0, 1) for tag in range(batch)]
        first = time.monotonic()
        for peer in self.peers:
            call_ids = peer.call_ids(batch)
            peer.send(Votes(call_ids[0], tuple(map(Vote, call_ids, specs))))
        last = time.monotonic()
        for peer in self.peers:
            for _ in range(batch):
                plan = peer.receive(Plan)
                assert isinstance(plan, Plan)
                call_id = plan.calls[plan.order.index(peer.peer_id)]
                peer.send(Report(call_id, plan.attempt_id, True, digest=1))
        for peer in self.peers:
            for _ in range(batch):
                decision = peer.receive(Decision)
                assert isinstance(decision, Decision)
                if not decision.committed or decision.value != self._count:
                    raise WorkerFailed(f"{peer.name} got {decision}")
        now = time.monotonic()
        return now - first, now - last

    def close(self) -> None:
        """Breaks all connections."""
        for peer in self.peers:
            peer.socket.close()
        self._context.term()


class BareRouter:
    """A bare socket with a master's options, for a `Worker`: all its memory is ZeroMQ's own."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = open_router(self._context, limits.HEARTBEAT_TIMEOUT_NS)
        self._socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self._socket.bind("tcp://127.0.0.1:*")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._routing_ids: dict[bytes, None] = {}

    def address(self) -> str:
        """Where it listens."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def take(self, count: int) -> None:
        """Receives `count` messages."""
        for _ in range(count):
            routing_id, _ = self._socket.recv_multipart()
            self._routing_ids.setdefault(routing_id)
        while self._monitor.poll(0):
            self._monitor.recv_multipart()

    def send(self, sizes: Sequence[int]) -> None:
        """Sends messages of these sizes to all peers that have sent something."""
        for size in sizes:
            frame = zmq.Frame(bytes(size), copy=True)  # As a master does for a message to many peers.
            for routing_id in self._routing_ids:
                self._socket.send_multipart((routing_id, frame), copy=False)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def bare_bytes_per_peer(count: int, taken: Sequence[int], sent: Sequence[int]) -> tuple[float, float]:
    """Growth of resident memory per connection of a bare socket.

    Args:
        count: connections.
        taken: sizes of the messages that each of them sends.
        sent: sizes of the messages that each of them receives.

    Returns:
        Bytes per connection after one message each, and after all messages.
    """
    with ended_workers() as workers:
        workers.append(worker := Worker("bare router", BareRouter))
        with contextlib.closing(Crowd(worker.call("address"), count)) as crowd:
            empty_bytes = memory_bytes(worker.pid)
            crowd.connect(count)
            worker.begin("take", count)
            crowd.send_all(taken[:1])
            worker.result()
            greeted_bytes = memory_bytes(worker.pid)
            worker.begin("take", count * len(taken[1:]))
            crowd.send_all(taken[1:])
            worker.result()
            worker.begin("send", sent)
            crowd.receive_all(len(sent))
            worker.result()
            return (greeted_bytes - empty_bytes) / count, (memory_bytes(worker.pid) - empty_bytes) / count


def measure_crowd(count: int, rounds: int, batch: int) -> Row:
    """All rounds with one number of peers."""
    allow_descriptors(DESCRIPTORS_PER_PEER * count + SPARE_DESCRIPTORS)
    with Master() as master:
        pid = master.pid
        empty_bytes = memory_bytes(pid)
        with contextlib.closing(Crowd(master.address, count)) as crowd:
            crowd.join()
            crowd.reduce(batch)  # Warm-up, not measured.
            totals, seconds, cpu_seconds = [], [], []
            for _ in range(rounds):
                began_ns = process_cpu_ns(pid)
                total, since_last_vote = crowd.reduce(batch)
                cpu_seconds.append((process_cpu_ns(pid) - began_ns) / 1e9)
                totals.append(total)
                seconds.append(since_last_vote)
            grown_bytes = memory_bytes(pid) - empty_bytes
            typical = crowd.peers[count // 2]
    greeted_bytes, bare_bytes = bare_bytes_per_peer(count, typical.sent_bytes, typical.received_bytes)
    messages = count * (1 + 3 * batch)
    return {
        "peers": count,
        "batch": batch,
        "rounds": rounds,
        **spread(seconds, "seconds"),
        **spread(cpu_seconds, "master_cpu_seconds"),
        "messages_per_second": messages / statistics.median(totals),
        "master_cpu_us_per_message": statistics.median(cpu_seconds) * 1e6 / messages,
        "resident_kib_per_peer": grown_bytes / count / 1024,
        "greeted_kib_per_peer": greeted_bytes / 1024,
        "bare_kib_per_peer": bare_bytes / 1024,
        "own_kib_per_peer": (grown_bytes / count - bare_bytes) / 1024,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--peers", [10, 100, 1000], type=whole(2, limits.PEERS_MAX))
    add(parser, "--batch", [1], "collectives of a round", type=positive)
    add(parser, "--rounds", 11, "to measure", type=positive)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    calls_max = limits.calls_in_flight_max(max(options.peers))
    if max(options.batch) > calls_max:
        parser.error(f"--batch: more than {calls_max} calls in flight, with {max(options.peers)} peers")


def measure(options: argparse.Namespace) -> Rows:
    for count in options.peers:
        for batch in options.batch:
            yield measure_crowd(count, options.rounds, batch)


COLUMNS = [
    *plain("peers", "batch"),
    *times("seconds", ".2f"),
    Column("master CPU ms", "master_cpu_seconds_median", ".2f", 1e3),
    Column("messages/s", "messages_per_second", ".0f"),
    Column("CPU us/message", "master_cpu_us_per_message", ".1f"),
    *(Column(f"{name} KiB", f"{name}_kib_per_peer", ".1f") for name in ("resident", "greeted", "bare", "own")),
]

SCENARIO = Scenario(__doc__, add_arguments, measure, "Vote rounds of the master", COLUMNS, check)
