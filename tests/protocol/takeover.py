"""A master that takes a run over from the reports of peers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.messages import Decision, Hello, Refusal, RunReport

from .harness import MasterBench, member_list, pid, pids, token

OLD_RUN = b"the run of before"[:16]


def hello_of(name: str, run_id: bytes = OLD_RUN, connection: int = 1) -> Hello:
    return Hello(pid(name), token(name), True, 0, name, (f"{name}:1",), connection, run_id)


def report_of(name: str, members: str = "ab", epoch: int = 5, **facts: Any) -> RunReport:
    """What a peer knows: by default only a member list."""
    hello = facts.pop("hello", hello_of(name, facts.pop("run_id", OLD_RUN)))
    hello = replace(hello, term=facts.pop("term", hello.term))
    listed = member_list(epoch, members, **facts.pop("groups", {})).members
    admitted = {name: facts.pop("since", 0), **facts.pop("admitted", {})}  # By which list.
    listed = tuple(replace(member, since=admitted.get(member.name, 0)) for member in listed)
    blank = RunReport(hello, 0, epoch if members else 0, listed, 0, 0, None, (), ())
    return replace(blank, **facts)


def outcome(attempt_id: int, committed: bool, names: str, *calls: int, value: int = 2) -> Decision:
    """What a peer knows of the end of an attempt."""
    return Decision(0, 0 if committed else 6, value, attempt_id=attempt_id, order=pids(names), calls=calls)


class TakeOver(MasterBench):
    """A master that was started in place of another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machine.recover(self.now_ns)
        self.reports: dict[bytes, RunReport] = {}

    def report(self, names: str, *arguments: Any, waits: bool = True, **facts: Any) -> list[Any]:
        """Peers connect and report. Returns the messages. After all of the newest list, waits for further peers."""
        return [told for name in names for told in self._report(name, arguments, waits, facts)]

    def _report(self, name: str, arguments: tuple[Any, ...], waits: bool, facts: dict[str, Any]) -> list[Any]:
        self.connections[name] = f"{name}1"
        report = self.reports[pid(name)] = report_of(name, *arguments, **facts)
        assert [m.refusal for _, m in self.say(name, report.hello)] in ([Refusal.REPORT], [])
        told = self.say(name, report)
        newest = max(self.reports.values(), key=lambda each: each.epoch)
        are_all_here = all(member.peer_id in self.reports for member in newest.members)
        if waits and newest.members and are_all_here and self.machine.is_recovering:
            told += self.tick(limits.RECOVERY_GRACE_NS)
        return told
