"""Settings of a wide-area network, and their text form. Pure: no I/O.

A line changes the settings that it names and leaves the others as they are. Hosts are numbered from 0; * is every host;
# begins a comment.

    path FROM TO key=value ...     one direction
    link ONE OTHER key=value ...   both directions
    host HOST key=value ...
    timing key=value ...           the emulator

The keys are the fields of the classes below. Values are numbers, optionally with %, k, M or G: loss=0.1%,
queue_bytes=2M. A rate of 0 is unlimited; a queue of 0 bytes holds DEFAULT_QUEUE_MS at its rate.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

DEFAULT_QUEUE_MS = 100
DEFAULT_QUEUE_BYTES_MIN = 128_000
JITTER_PERIOD_MS_MIN = 0.1
_SUFFIXES = {"%": 0.01, "k": 1e3, "M": 1e6, "G": 1e9}


class SettingsError(ValueError):
    """An invalid line of settings."""


@dataclass(frozen=True)
class PathSettings:
    """One direction between two hosts."""

    delay_ms: float = 0.0
    """One-way delay."""
    jitter_ms: float = 0.0
    """Amplitude of the variation of the delay; packets keep their order."""
    jitter_period_ms: float = 20.0
    """Period of the variation."""
    rate_mbit: float = 0.0
    """Rate of IP packets, headers included, of all connections together."""
    loss: float = 0.0
    """Fraction of the segments that are lost, from 0 to 1."""
    loss_run: float = 1.0
    """Mean number of segments lost in a row; 1: losses are independent."""
    queue_bytes: float = 0.0
    """Size of the queue before the rate limit; further packets are dropped."""
    cut: bool = False
    """All packets are silently dropped, those in flight too."""


@dataclass(frozen=True)
class HostSettings:
    """Settings of a host, which all its paths share."""

    egress_mbit: float = 0.0
    egress_queue_bytes: float = 0.0
    ingress_mbit: float = 0.0
    ingress_queue_bytes: float = 0.0
    down: bool = False
    """The host is silently disconnected, without RST."""


@dataclass(frozen=True)
class Timing:
    """Timing of the emulator."""

    burst_us: float = 250.0
    """Maximum size of a piece of a TCP super-packet that enters a shaper, as time on the line."""
    coalesce_us: float = 100.0
    """Minimum time between two wake-ups under load; 0: none."""
    memory_bytes: float = 4e9
    """Bound on packets in flight; further ones are dropped."""


SettingsPart = TypeVar("SettingsPart", PathSettings, HostSettings, Timing)


@dataclass(frozen=True)
class Settings:
    """A whole network.

    Args:
        host_count: hosts 0 to host_count - 1.
    """

    host_count: int
    paths: Mapping[tuple[int, int], PathSettings] = field(default_factory=dict)
    """Both directions of every pair."""
    hosts: Mapping[int, HostSettings] = field(default_factory=dict)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        every = range(self.host_count)
        paths = {(i, j): self.paths.get((i, j), PathSettings()) for i in every for j in every if i != j}
        hosts = {i: self.hosts.get(i, HostSettings()) for i in every}
        object.__setattr__(self, "paths", MappingProxyType(paths))
        object.__setattr__(self, "hosts", MappingProxyType(hosts))

    def with_line(self, line: str) -> Settings:
        """These settings, changed as a line says.

        Raises:
            SettingsError: the line does not follow the grammar, or a value is out of range.
        """
        words = line.partition("#")[0].split()
        if not words:
            return self
        kind, rest = words[0], words[1:]
        if kind == "timing":
            return dataclasses.replace(self, timing=_changed(self.timing, rest))
        if kind == "host":
            hosts = dict(self.hosts)
            for host in self._hosts(rest[:1]):
                hosts[host] = _changed(hosts[host], rest[1:])
            return dataclasses.replace(self, hosts=hosts)
        if kind in ("path", "link"):
            paths = dict(self.paths)
            for pair in self._pairs(rest, both=kind == "link"):
                paths[pair] = _changed(paths[pair], rest[2:])
            return dataclasses.replace(self, paths=paths)
        raise SettingsError(f"{kind!r} is none of path, link, host, timing")

    def with_lines(self, lines: Iterable[str]) -> Settings:
        """These settings, changed by one line after the other.

        Raises:
            SettingsError: names the first wrong line by its number, from 1.
        """
        settings = self
        for number, line in enumerate(lines, 1):
            try:
                settings = settings.with_line(line)
            except SettingsError as error:
                raise SettingsError(f"line {number}: {error}") from error
        return settings

    def lines(self) -> list[str]:
        """Lines that describe all settings."""
        shown = [f"timing {_pairs_of(self.timing)}"]
        shown += [f"host {host} {_pairs_of(settings)}" for host, settings in self.hosts.items()]
        shown += [f"path {one} {other} {_pairs_of(settings)}" for (one, other), settings in self.paths.items()]
        return shown

    def _hosts(self, words: list[str]) -> list[int]:
        if words == ["*"]:
            return list(range(self.host_count))
        if not words or not words[0].isdecimal() or int(words[0]) >= self.host_count:
            given = words[0] if words else "nothing"
            raise SettingsError(f"{given!r} is no host; they are 0 to {self.host_count - 1}, or *")
        return [int(words[0])]

    def _pairs(self, words: list[str], *, both: bool) -> list[tuple[int, int]]:
        ones, others = self._hosts(words[:1]), self._hosts(words[1:2])
        pairs = [(one, other) for one in ones for other in others if one != other]
        if not pairs:
            raise SettingsError(f"no path leads from host {words[0]} to itself")
        return pairs + [(other, one) for one, other in pairs if both and (other, one) not in pairs]


def queue_bytes(given: float, rate_mbit: float) -> float:
    """The size of a queue in front of a rate limit."""
    return given or max(DEFAULT_QUEUE_BYTES_MIN, rate_mbit * 1e6 / 8 * DEFAULT_QUEUE_MS / 1e3)


def _changed(part: SettingsPart, words: list[str]) -> SettingsPart:
    names = {field.name for field in dataclasses.fields(part)}
    values: dict[str, Any] = {}
    for word in words:
        name, separator, text = word.partition("=")
        if name not in names or not separator:
            raise SettingsError(f"{word!r} is not key=value with a key of {', '.join(sorted(names))}")
        values[name] = _number(name, text)
        if isinstance(getattr(part, name), bool):
            values[name] = bool(values[name])
    return dataclasses.replace(part, **values)


def _number(name: str, text: str) -> float:
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1.0)
    try:
        value = float(digits) * factor
    except ValueError:
        raise SettingsError(f"{name}: {text!r} is no number") from None
    lowest = {"loss_run": 1.0, "jitter_period_ms": JITTER_PERIOD_MS_MIN}.get(name, 0.0)
    highest = 1.0 if name in ("loss", "cut", "down") else math.inf
    if not lowest <= value <= highest or not math.isfinite(value):
        raise SettingsError(f"{name}={text}: it must be at least {lowest:g} and at most {highest:g}")
    return value


def _pairs_of(part: PathSettings | HostSettings | Timing) -> str:
    values = ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))
    return " ".join(f"{name}={repr(float(value)).removesuffix('.0')}" for name, value in values)
