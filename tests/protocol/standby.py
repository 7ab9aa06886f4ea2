"""A master that is one of two, and a peer that knows both masters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.leadership import Promise
from zpccl.protocol.messages import Acknowledgement, Refusal

from .harness import UPDATE, MasterBench, PeerBench, spec
from .takeover import report_of

TWO: dict[str, Any] = {"masters": ("m:1", "n:2")}


class Standby(MasterBench):
    """One of two masters."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine.recover(self.now_ns)

    def break_bounds(self, name: str) -> None:
        """A member votes twice for one call, and is removed for it."""
        self.begin(name, 50, spec(1))
        self.begin(name, 50, spec(2))

    def report(self, names: str, *arguments: Any, promised: int | None = None, **facts: Any) -> list[Any]:
        """Peers connect, are asked for a report, and report. Returns the messages of the master."""
        return [told for name in names for told in self._report(name, arguments, promised, facts)]

    def _report(self, name: str, arguments: tuple[Any, ...], promised: int | None, facts: dict[str, Any]) -> list[Any]:
        number = sum(str(c).startswith(name) for c in self.said) + 1
        self.connections[name] = f"{name}{number}"
        report = report_of(name, *arguments, **facts)
        hello = replace(report.hello, connection=number, **TWO)
        (asked,) = [m for to, m in self.say(name, hello) if to == self.connections[name]]
        assert asked.refusal is Refusal.REPORT
        promise = None if promised is None else Promise(promised, b"some other one..")
        return self.say(name, replace(report, hello=self.promising(hello, promise)))

    def see(self, names: Iterable[str]) -> None:
        """Members acknowledge the present list."""
        for name in names:
            self.say(name, Acknowledgement(self.machine.registry.epoch))

    def begin_run(self, names: str) -> None:
        """A run with these members and a committed list."""
        self.now_ns += limits.RECOVERY_GRACE_NS
        self.hello(names[0], begins=self.machine.run_id, **TWO)
        self.tick(limits.RECOVERY_GRACE_NS)
        self.hello(names[1:], **TWO)
        self.link(names)
        if len(names) > 1:
            self.vote(names[0], UPDATE, 900)
            self.see(names)
        assert self.names() == names
        assert self.machine.registry.is_committed


def peer_of_two() -> PeerBench:
    """A new peer."""
    return PeerBench(masters=("m:1", "n:2"))
