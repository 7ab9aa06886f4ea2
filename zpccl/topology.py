"""The measured network: the rates of paths and hosts, and the addresses and interfaces of this peer's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zpccl import limits
from zpccl.control.link_ends import LinkEnds
from zpccl.errors import printable
from zpccl.protocol.messages import Measurements

_MBIT_BYTES = 125_000


@dataclass(frozen=True)
class TopologyPeer:
    """A member.

    Attributes:
        peer_id: in hexadecimal, as `Communicator.peer_id`.
        name: its name, which need not be unique.
        group: its peer group.
        sent_bytes_per_second, received_bytes_per_second: the highest rate at which its host sends, or receives, over
            all its paths together. None: unknown, because the host has never been the limit.
    """

    peer_id: str
    name: str
    group: int = 0
    sent_bytes_per_second: int | None = None
    received_bytes_per_second: int | None = None


@dataclass(frozen=True)
class TopologyPath:
    """The path from one peer to another.

    Attributes:
        sender, receiver: its ends.
        bytes_per_second: its measured rate, of tensors and their headers. None: unknown, because the path has not been
            used for a large tensor, or because something else was always slower.
        round_trip: seconds. None: unknown.
        age: seconds since the rate was measured; if the rate is unknown, since the path was last used. None: never.
    """

    sender: TopologyPeer
    receiver: TopologyPeer
    bytes_per_second: int | None = None
    round_trip: float | None = None
    age: float | None = None


@dataclass(frozen=True)
class TopologyLink:
    """A link of this peer.

    Attributes:
        peer: the peer at its other end.
        ends: addresses, interface, number of connections and congestion control of this side.
    """

    peer: TopologyPeer
    ends: LinkEnds


@dataclass(frozen=True)
class Topology:
    """The measured network. `str()` gives a table for people.

    Attributes:
        peers: the members, in ring order.
        paths: the paths that have been used, the latest first; `path` gives any path. A new master knows none.
        links: the links of this peer; empty in a master's own view.
    """

    peers: tuple[TopologyPeer, ...]
    paths: tuple[TopologyPath, ...]
    links: tuple[TopologyLink, ...] = field(default=())

    @classmethod
    def of(
        cls, measurements: Measurements, group: int | None = None, ends: Mapping[bytes, LinkEnds] | None = None
    ) -> Topology:
        """Makes one from a master's measurements, of one group or of all, and the link ends of a peer, by peer id."""
        hosts = {host.member: (host.sent_per_second, host.received_per_second) for host in measurements.hosts}
        peers = {
            index: TopologyPeer(member.peer_id.hex(), member.name, member.group, *hosts.get(index, ()))
            for index, member in enumerate(measurements.members)
            if group in (None, member.group)
        }
        paths = [
            TopologyPath(
                peers[path.sender],
                peers[path.receiver],
                path.bytes_per_second,
                None if path.round_trip_us is None else path.round_trip_us * limits.US / limits.SECOND,
                path.age_ms * limits.MS / limits.SECOND,
            )
            for path in measurements.paths
            if path.sender in peers and path.receiver in peers
        ]
        ends = ends or {}
        by_id = {bytes.fromhex(peer.peer_id): peer for peer in peers.values()}
        links = [TopologyLink(peer, ends[peer_id]) for peer_id, peer in by_id.items() if peer_id in ends]
        return cls(tuple(peers.values()), tuple(paths), tuple(links))

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], TopologyPath]:
        return {(path.sender.peer_id, path.receiver.peer_id): path for path in self.paths}

    def path(self, sender: TopologyPeer, receiver: TopologyPeer) -> TopologyPath:
        """The path between two peers; unknown values are None. A round trip counts for both directions."""
        found = self._by_pair.get((sender.peer_id, receiver.peer_id))
        if found is not None:
            return found
        back = self._by_pair.get((receiver.peer_id, sender.peer_id))
        return TopologyPath(sender, receiver, round_trip=None if back is None else back.round_trip)

    @cached_property
    def _measured(self) -> list[TopologyPath]:
        return [path for path in self.paths if path.bytes_per_second is not None]

    def slowest(self, count: int) -> tuple[TopologyPath, ...]:
        """At most `count` paths of known rate, the slowest first."""
        return tuple(sorted(self._measured, key=lambda path: path.bytes_per_second or 0)[:count])

    def __str__(self) -> str:
        lines = [f"{len(self.peers)} peers; paths measured: {len(self._measured)}; rates in Mbit/s, round trips in ms"]
        is_small = len(self.peers) <= limits.TOPOLOGY_MATRIX_PEERS_MAX
        lines += self._matrix_lines() if is_small else self._list_lines()
        if self.links:
            lines += ["links of this peer:"]
            lines += [f"  {printable(link.peer.name)}: {link.ends}" for link in self.links[: limits.TOPOLOGY_LINES_MAX]]
            lines += _rest(len(self.links), "links")
        return "\n".join(lines)

    def _matrix_lines(self) -> list[str]:
        """One row for each sender with the rates of its host, one column for each receiver."""
        rows = [["from \\ to", *(str(index) for index in range(len(self.peers))), "host sends", "receives"]]
        for index, sender in enumerate(self.peers):
            cells = ["-" if sender is receiver else _cell(self.path(sender, receiver)) for receiver in self.peers]
            hosts = _rate(sender.sent_bytes_per_second), _rate(sender.received_bytes_per_second)
            rows.append([f"{index} {printable(sender.name)}", *cells, *hosts])
        return _columns(rows)

    def _list_lines(self) -> list[str]:
        slowest = self.slowest(limits.TOPOLOGY_LINES_MAX)
        rows = [[printable(f"{path.sender.name} to {path.receiver.name}"), _cell(path)] for path in slowest]
        return ["the slowest paths:", *_columns(rows), *_rest(len(self._measured), "paths")]


def _cell(path: TopologyPath) -> str:
    """Rate and round trip of a path, such as "94 20ms"; "?" for what is unknown."""
    trip = "" if path.round_trip is None else f" {digits(path.round_trip * 1e3)}ms"
    return f"{_rate(path.bytes_per_second)}{trip}"


def _rate(bytes_per_second: int | None) -> str:
    return "?" if bytes_per_second is None else digits(bytes_per_second / _MBIT_BYTES)


def digits(value: float) -> str:
    """A number with three significant digits, or all digits before the point: 0.123, 12.3, 12345."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def _rest(count: int, what: str) -> list[str]:
    more = count - limits.TOPOLOGY_LINES_MAX
    return [f"  and {more} more {what}"] if more > 0 else []


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines of text: the first column to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return lines
