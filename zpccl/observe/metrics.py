"""Metrics of a master for Prometheus. Needs prometheus-client, which comes with the extra `cli`.

The threads of the HTTP server, one for each open connection and METRICS_CONNECTIONS_MAX at most, read only the last
snapshot that the master's loop has published. Replacing the reference to it is atomic, so there is no lock.
`MetricsServer.close()` ends the server and closes its socket.
"""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zpccl import limits
from zpccl.control.addresses import format_address, parse_address
from zpccl.control.forks import closed_in_children
from zpccl.errors import InvalidArgument, InvalidUsage
from zpccl.observe.snapshot import Snapshot, Straggler
from zpccl.protocol.counts import AbortReason, LossReason
from zpccl.state.workers import start_thread
from zpccl.topology import Topology

OTHER_GROUPS = "other"


class SnapshotCollector(Collector):
    """Converts the last snapshot to metrics.

    Args:
        clock: returns the time in nanoseconds on the clock of the snapshots.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """The metrics; none before the first snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        yield from _state(snapshot)
        yield from _events(snapshot)
        yield from _traffic(snapshot)
        yield from _straggling(snapshot, self._clock())
        yield from _network(snapshot)


def _state(snapshot: Snapshot) -> Iterator[Metric]:
    yield _by_group("zpccl_members", "Members of the run.", snapshot.members)
    yield _by_group("zpccl_pending_peers", "Peers that wait to be admitted.", snapshot.pending)
    yield GaugeMetricFamily("zpccl_epoch", "Number of the member list.", snapshot.epoch)
    yield GaugeMetricFamily("zpccl_term", "Number of this master's leadership.", snapshot.term)
    text = "1 until this master leads a run: after a start, and always at a standby."
    yield GaugeMetricFamily("zpccl_recovering", text, int(snapshot.is_recovering))
    text = "Collectives that wait for votes or links."
    yield GaugeMetricFamily("zpccl_collectives_voting", text, snapshot.collectives_voting)
    yield GaugeMetricFamily("zpccl_collectives_running", "Collectives that run.", snapshot.collectives_running)
    yield GaugeMetricFamily("zpccl_syncs_running", "Syncs of shared state that run.", snapshot.syncs_running)


def _by_group(name: str, text: str, counts: Mapping[int, int]) -> Metric:
    """A gauge by peer group. Peers choose their group, so only the largest groups get their own time series."""
    family = GaugeMetricFamily(name, text, labels=["peer_group"])
    by_size = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    for group, count in by_size[: limits.METRICS_GROUPS_MAX]:
        family.add_metric([str(group)], count)
    rest = by_size[limits.METRICS_GROUPS_MAX :]
    if rest:
        family.add_metric([OTHER_GROUPS], sum(count for _, count in rest))
    return family


def _events(snapshot: Snapshot) -> Iterator[Metric]:
    yield CounterMetricFamily("zpccl_plans", "Attempts at collectives that were started.", snapshot.plans)
    yield CounterMetricFamily("zpccl_commits", "Attempts that were committed.", snapshot.commits)
    aborts = CounterMetricFamily("zpccl_aborts", "Attempts that were aborted.", labels=["reason"])
    for abort_reason in AbortReason:
        aborts.add_metric([abort_reason.value], snapshot.aborts.get(abort_reason, 0))
    yield aborts
    syncs = CounterMetricFamily("zpccl_syncs", "Syncs of shared state that ended.", labels=["outcome"])
    syncs.add_metric(["committed"], snapshot.syncs_committed)
    syncs.add_metric(["aborted"], snapshot.syncs_aborted)
    yield syncs
    yield CounterMetricFamily(
        "zpccl_sync_sources_dropped",
        "Sources that fetches of shared state dropped, because they sent nothing or wrong bytes.",
        snapshot.sources_dropped,
    )
    losses = CounterMetricFamily("zpccl_peers_lost", "Peers that are gone, pending ones included.", labels=["reason"])
    for loss_reason in LossReason:
        losses.add_metric([loss_reason.value], snapshot.losses.get(loss_reason, 0))
    yield losses
    yield CounterMetricFamily("zpccl_takeovers", "Runs taken over from another master.", snapshot.takeovers)
    text = "Malformed messages, or messages with another sender's peer id."
    yield CounterMetricFamily("zpccl_malformed_messages", text, snapshot.malformed_messages)


def _traffic(snapshot: Snapshot) -> Iterator[Metric]:
    traffic = snapshot.traffic
    text = "Connections that were refused."
    yield CounterMetricFamily("zpccl_refused_connections", text, traffic.refused_connections)
    yield GaugeMetricFamily("zpccl_connections", "Open control connections.", traffic.connections)
    yield CounterMetricFamily("zpccl_messages_received", "Control messages received.", traffic.messages_received)
    yield CounterMetricFamily("zpccl_messages_sent", "Control messages sent.", traffic.messages_sent)
    yield CounterMetricFamily("zpccl_received_bytes", "Bytes of control messages received.", traffic.received_bytes)
    yield CounterMetricFamily("zpccl_sent_bytes", "Bytes of control messages sent.", traffic.sent_bytes)
    text = "Seconds in which the master's loop did not wait."
    yield CounterMetricFamily("zpccl_busy_seconds", text, traffic.busy_ns / limits.SECOND)


def _straggling(snapshot: Snapshot, now_ns: int) -> Iterator[Metric]:
    """Waiting times by peer and function. Peers choose their names, so only the longest waits get a time series."""
    longest: dict[tuple[str, str], Straggler] = {}
    for straggler in sorted(snapshot.stragglers, key=lambda straggler: -straggler.waiting_ns):
        longest.setdefault((straggler.peer, straggler.operation.partition(" ")[0]), straggler)
    text = "Seconds for which others have waited for a peer."
    family = GaugeMetricFamily("zpccl_straggler_seconds", text, labels=["peer", "operation"])
    for labels, straggler in list(longest.items())[: limits.METRICS_STRAGGLERS_MAX]:
        family.add_metric(labels, (straggler.waiting_ns + now_ns - snapshot.taken_ns) / limits.SECOND)
    yield family
    yield GaugeMetricFamily("zpccl_stragglers", "Peers that others wait for.", len({peer for peer, _ in longest}))


def _network(snapshot: Snapshot) -> Iterator[Metric]:
    """The slowest paths, by the names of their ends; if several paths have the same names, the slowest of them."""
    topology = Topology.of(snapshot.measurements)
    text = "Measured rate of a path between two peers, for the slowest paths."
    rates = GaugeMetricFamily("zpccl_path_bytes_per_second", text, labels=["sender", "receiver"])
    text = "Round-trip time of these paths."
    trips = GaugeMetricFamily("zpccl_path_round_trip_seconds", text, labels=["sender", "receiver"])
    seen: set[tuple[str, str]] = set()
    for path in topology.slowest(limits.METRICS_PATHS_MAX):
        names = path.sender.name, path.receiver.name
        if names in seen:
            continue
        seen.add(names)
        rates.add_metric(names, path.bytes_per_second or 0)
        if path.round_trip is not None:
            trips.add_metric(names, path.round_trip)
    yield rates
    yield trips
    yield GaugeMetricFamily("zpccl_paths_measured", "Paths between peers that have been used.", len(topology.paths))


class _Handler(WSGIRequestHandler):
    """Answers one request. The connection of a client that is silent for too long is closed."""

    timeout = limits.METRICS_SILENCE_NS / limits.SECOND

    def log_message(self, *_: Any) -> None:
        """Logs nothing: the log of a master is not an access log."""


class _Server(ThreadingMixIn, WSGIServer):
    """One thread for each connection; nobody waits for its end. Connections beyond the bound are closed at once."""

    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(limits.METRICS_CONNECTIONS_MAX)
        self._is_ending = threading.Event()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Binds. HTTPServer would also look up the name of the address: half a minute if no resolver answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """Accepts a connection. If that fails, as it does without a free descriptor, it waits before the next try.

        The connection stays in the queue of the socket, so the server would try again and again meanwhile.
        """
        try:
            return super().get_request()
        except OSError:
            self._is_ending.wait(limits.METRICS_RETRY_NS / limits.SECOND)
            raise

    def shutdown(self) -> None:
        """Ends serve_forever(), and waits until it has ended."""
        self._is_ending.set()
        super().shutdown()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts a thread, unless METRICS_CONNECTIONS_MAX run."""
        if not self._slots.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # There are too many threads in this process.
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves the request, in the thread."""
        # Otherwise a client that ends at the wrong moment would end a program that has not left SIGPIPE ignored.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, *_: Any) -> None:
        """Prints nothing: the client is gone or silent. The default prints its address and a traceback."""


class MetricsServer:
    """Serves the metrics of a master at /metrics, without authentication.

    Args:
        listen: "host:port" to listen on; port 0 takes a free one.

    Attributes:
        address: where it listens, "host:port".

    Raises:
        InvalidArgument: the address is malformed or does not belong to this host.
        InvalidUsage: the port is in use.
        InternalError: the system has no thread to give.
    """

    def __init__(self, listen: str) -> None:
        host, port = parse_address(listen, what="metrics address")
        registry = CollectorRegistry()
        self._collector = SnapshotCollector()
        registry.register(self._collector)
        try:
            self._server = _Server(host, port)
        except OSError as error:
            kind = InvalidUsage if error.errno == errno.EADDRINUSE else InvalidArgument
            raise kind(f"cannot serve metrics on {listen}: {error.strerror}") from error
        closed_in_children(self._server.socket)
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, name="zpccl-metrics", daemon=True)
        try:
            start_thread(self._thread)
        except BaseException:
            self._server.server_close()
            raise
        self.address = format_address(host, self._server.server_port)

    def publish(self, snapshot: Snapshot) -> None:
        """Replaces the snapshot that is served."""
        self._collector.snapshot = snapshot

    def close(self) -> None:
        """Stops the server and waits until it has ended."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
