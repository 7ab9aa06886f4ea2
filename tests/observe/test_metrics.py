"""The metrics of a master, made of snapshots."""

from __future__ import annotations

import builtins
import errno
import itertools
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from socketserver import TCPServer
from typing import Any

import pytest
from e2e.strangers import reset_when_closed
from engine_mesh import until
from interpreter import handling
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import zpccl
from zpccl import limits
from zpccl.limits import SECOND
from zpccl.master_node import open_metrics
from zpccl.observe import metrics
from zpccl.observe.metrics import MetricsServer, SnapshotCollector
from zpccl.observe.snapshot import Snapshot, Straggler, Traffic, take_snapshot
from zpccl.protocol.counts import AbortReason, LossReason
from zpccl.protocol.master import MasterMachine
from zpccl.protocol.messages import MeasuredPath, Measurements, Member

NOW_NS = 100 * SECOND
EMPTY: dict[str, Any] = {
    "taken_ns": NOW_NS,
    "epoch": 0,
    "term": 0,
    "is_recovering": False,
    "members": {},
    "pending": {},
    "collectives_voting": 0,
    "collectives_running": 0,
    "syncs_running": 0,
    "plans": 0,
    "commits": 0,
    "aborts": {},
    "syncs_committed": 0,
    "syncs_aborted": 0,
    "sources_dropped": 0,
    "losses": {},
    "takeovers": 0,
    "malformed_messages": 0,
}

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: str) -> Series:
    """The value of each series by its name and labels. No series may come twice."""
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"{key} comes twice"
            found[key] = sample.value
    return found


def shown(now_ns: int = NOW_NS, **facts: Any) -> Series:
    """The series of a snapshot, as Prometheus reads them."""
    collector = SnapshotCollector(clock=lambda: now_ns)
    collector.snapshot = Snapshot(**{**EMPTY, **facts})
    registry = CollectorRegistry()
    registry.register(collector)
    return samples(generate_latest(registry).decode())


def value(series: Series, name: str, **labels: str) -> float | None:
    return series.get((name, tuple(sorted(labels.items()))))


def test_nothing_before_the_first_snapshot() -> None:
    assert list(SnapshotCollector().collect()) == []


def test_each_fact_has_its_series() -> None:
    traffic = Traffic(
        messages_received=11,
        received_bytes=12,
        messages_sent=13,
        sent_bytes=14,
        refused_connections=15,
        connections=16,
        busy_ns=SECOND // 4,
    )
    series = shown(
        epoch=1 << 40,
        term=2,
        is_recovering=True,
        members={0: 3, 7: 4},
        pending={7: 5},
        collectives_voting=6,
        collectives_running=7,
        syncs_running=8,
        plans=9,
        commits=10,
        aborts=Counter({AbortReason.FAILED: 2}),
        syncs_committed=17,
        syncs_aborted=18,
        sources_dropped=19,
        losses=Counter({LossReason.LEFT: 3}),
        takeovers=19,
        malformed_messages=20,
        traffic=traffic,
    )
    plain = {
        "epoch": 1 << 40,
        "term": 2,
        "recovering": 1,
        "collectives_voting": 6,
        "collectives_running": 7,
        "syncs_running": 8,
        "plans_total": 9,
        "commits_total": 10,
        "takeovers_total": 19,
        "malformed_messages_total": 20,
        "messages_received_total": 11,
        "received_bytes_total": 12,
        "messages_sent_total": 13,
        "sent_bytes_total": 14,
        "refused_connections_total": 15,
        "connections": 16,
        "busy_seconds_total": 0.25,
        "stragglers": 0,
    }
    assert {name: value(series, f"zpccl_{name}") for name in plain} == plain
    assert value(series, "zpccl_members", peer_group="0") == 3
    assert value(series, "zpccl_members", peer_group="7") == 4
    assert value(series, "zpccl_pending_peers", peer_group="7") == 5
    assert {reason: value(series, "zpccl_aborts_total", reason=reason.value) for reason in AbortReason} == {
        **dict.fromkeys(AbortReason, 0),
        AbortReason.FAILED: 2,
    }
    assert {reason: value(series, "zpccl_peers_lost_total", reason=reason.value) for reason in LossReason} == {
        **dict.fromkeys(LossReason, 0),
        LossReason.LEFT: 3,
    }
    assert value(series, "zpccl_syncs_total", outcome="committed") == 17
    assert value(series, "zpccl_syncs_total", outcome="aborted") == 18
    assert value(series, "zpccl_sync_sources_dropped_total") == 19


def test_many_groups_share_a_series() -> None:
    """Peers choose their groups, so one series for each would be unbounded."""
    members = dict.fromkeys(range(1000), 1)
    members[999] = 5
    series = shown(members=members)
    counts = {dict(labels)["peer_group"]: n for (name, labels), n in series.items() if name == "zpccl_members"}
    assert len(counts) == limits.METRICS_GROUPS_MAX + 1
    assert counts["999"] == 5 and sum(counts.values()) == 1004
    assert counts["other"] == 1000 - limits.METRICS_GROUPS_MAX


def test_stragglers_wait_on_between_snapshots() -> None:
    straggler = Straggler("a", "all_reduce at tag 7 of group 0", 2 * SECOND)
    series = shown(now_ns=NOW_NS + 3 * SECOND, stragglers=(straggler,))
    assert value(series, "zpccl_straggler_seconds", peer="a", operation="all_reduce") == 5
    assert value(series, "zpccl_stragglers") == 1


def test_stragglers_are_bounded_and_may_have_one_name() -> None:
    same = [Straggler("same", f"all_reduce at tag {seconds}", seconds * SECOND) for seconds in (100, 300, 200)]
    others = [Straggler(f'"{number}\n', "all_reduce", number * SECOND) for number in range(100)]
    series = shown(stragglers=(*same, *others))
    waiting = {dict(labels)["peer"]: n for (name, labels), n in series.items() if name == "zpccl_straggler_seconds"}
    assert len(waiting) == limits.METRICS_STRAGGLERS_MAX
    assert waiting["same"] == 300 and waiting['"99\n'] == 99 and '"0\n' not in waiting
    assert value(series, "zpccl_stragglers") == 101


def test_a_snapshot_does_not_change() -> None:
    machine, traffic = MasterMachine(bytes(16)), Traffic()
    before = take_snapshot(machine, traffic, NOW_NS)
    machine.counts.aborts[AbortReason.FAILED] += 1
    machine.counts.losses[LossReason.LEFT] += 1
    machine.malformed_count += 1
    traffic.messages_sent += 1
    after = take_snapshot(machine, traffic, NOW_NS)
    assert (before.aborts, before.losses, before.malformed_messages) == ({}, {}, 0)
    assert (after.aborts, after.losses, after.malformed_messages) == ({AbortReason.FAILED: 1}, {LossReason.LEFT: 1}, 1)
    assert (before.traffic.messages_sent, after.traffic.messages_sent) == (0, 1)


def test_a_snapshot_asks_the_machine_for_stragglers(monkeypatch: pytest.MonkeyPatch) -> None:
    def stragglers(machine: MasterMachine, now_ns: int) -> tuple[tuple[str, str, int], ...]:
        return (("a", "update_topology", now_ns - 5),)

    monkeypatch.setattr(MasterMachine, "stragglers", stragglers, raising=False)
    snapshot = take_snapshot(MasterMachine(bytes(16)), Traffic(), NOW_NS)
    assert snapshot.stragglers == (Straggler("a", "update_topology", NOW_NS - 5),)


def test_serves_the_last_snapshot_until_it_is_closed() -> None:
    server = MetricsServer("127.0.0.1:0")
    try:
        for epoch in (1, 2):
            server.publish(Snapshot(**{**EMPTY, "epoch": epoch}))
            with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
                assert value(samples(answer.read().decode()), "zpccl_epoch") == epoch
        with pytest.raises(zpccl.InvalidUsage, match=f"{server.address}.*in use"):
            MetricsServer(server.address)
    finally:
        server.close()
    host, _, port = server.address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.1\r\n"])
def test_a_client_that_keeps_its_connection_open_holds_up_no_end(said: bytes) -> None:
    """L1: one client sends nothing, the other sends a request without an end."""
    server = MetricsServer("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(said)
        with urllib.request.urlopen(f"http://{server.address}/metrics"):
            pass  # So the previous one has been accepted.
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()


def test_clients_that_end_too_soon_cause_no_signal() -> None:
    """The default handler of SIGPIPE ends the program."""
    signals: list[int] = []
    server = MetricsServer("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with handling(signal.SIGPIPE, lambda number, _: signals.append(number)):
        for _ in range(50):
            with socket.create_connection((host, int(port))) as client:
                client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                client.shutdown(socket.SHUT_WR)
                reset_when_closed(client)
        server.close()
        until(lambda: server._server._slots._value == limits.METRICS_CONNECTIONS_MAX)
    assert not signals


def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: each has a thread and a descriptor in the master."""
    monkeypatch.setattr(limits, "METRICS_CONNECTIONS_MAX", 2)
    monkeypatch.setattr(metrics._Handler, "timeout", 0.5)
    server = MetricsServer("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    try:
        clients = [socket.create_connection((host, int(port)), 30) for _ in range(3)]
        assert clients[2].recv(1) == b"", "one too many, and it is kept"
        for client in clients:
            assert client.recv(1) == b"", "it has said nothing"
            client.close()
        until(lambda: server._server._slots._value == 2)
        with urllib.request.urlopen(f"http://{server.address}/metrics") as answer:
            assert answer.status == 200
    finally:
        server.close()


def test_a_process_without_descriptors_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: the server does not try again and again to accept a connection, and serves it later. L1: it can be ended."""
    tries: list[float] = []
    has_descriptors = threading.Event()
    accept = TCPServer.get_request

    def get_request(server: TCPServer) -> Any:
        tries.append(time.monotonic())
        if not has_descriptors.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(TCPServer, "get_request", get_request)
    server = MetricsServer("127.0.0.1:0")
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        until(lambda: len(tries) > 3)
        has_descriptors.set()
        assert client.recv(8) == b"HTTP/1.0"
    pauses = [later - earlier for earlier, later in itertools.pairwise(tries)]
    assert min(pauses) >= limits.METRICS_RETRY_NS / SECOND
    has_descriptors.clear()
    monkeypatch.setattr(limits, "METRICS_RETRY_NS", 3600 * SECOND)
    with socket.create_connection((host, int(port)), 30):
        until(lambda: len(tries) > len(pauses) + 1)
        server.close()


@pytest.mark.parametrize("address", ["", "9464", "127.0.0.1:99999", "192.0.2.77:0", "no.such.host.invalid:0"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(zpccl.InvalidArgument):
        MetricsServer(address)


def test_nobody_is_asked_for_the_name_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no resolver answers, the master would begin half a minute later."""
    asked: list[str] = []
    monkeypatch.setattr(socket, "getfqdn", asked.append)
    monkeypatch.setattr(socket, "gethostbyaddr", asked.append)
    MetricsServer("0.0.0.0:0").close()
    assert asked == []


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = builtins.__import__

    def without_prometheus(name: str, *arguments: Any) -> Any:
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, *arguments)

    monkeypatch.delitem(sys.modules, "zpccl.observe.metrics")
    monkeypatch.setattr(builtins, "__import__", without_prometheus)
    with pytest.raises(zpccl.InvalidUsage, match=r"zpccl\[cli\]"):
        open_metrics("127.0.0.1:0")


def test_the_slowest_paths_have_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: peers choose their names, and there is a path for each pair of peers. Two peers may have the same name."""
    monkeypatch.setattr(limits, "METRICS_PATHS_MAX", 3)
    members = tuple(Member(index.to_bytes(16, "big"), 0, name) for index, name in enumerate(("a", "b", "b", "c")))
    paths = (
        MeasuredPath(0, 1, 5, 300, 2000),
        MeasuredPath(0, 2, 5, 200),
        MeasuredPath(1, 0, 5, None, 1000),
        MeasuredPath(3, 0, 5, 100, 3000),
        MeasuredPath(0, 3, 5, 400, 4000),
    )
    series = shown(measurements=Measurements(members, paths))
    name = "zpccl_path_bytes_per_second"
    assert {labels: value for (found, labels), value in series.items() if found == name} == {
        (("receiver", "b"), ("sender", "a")): 200,
        (("receiver", "a"), ("sender", "c")): 100,
    }
    assert value(series, "zpccl_path_round_trip_seconds", sender="c", receiver="a") == 0.003
    assert value(series, "zpccl_paths_measured") == 5
