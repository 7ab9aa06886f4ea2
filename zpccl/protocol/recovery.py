"""What a new master makes of the reports of an earlier master's peers.

    History     the run as its reports tell it together; a pure value of them, whatever their order

Which list of members the master goes on with is a matter of leadership.py. The epoch of a list was announced before
anything that was decided in it, on every connection, so who knows of a decision knows who had part in it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from zpccl.protocol.leadership import MemberList, descend
from zpccl.protocol.messages import Decision, Member, Running, RunReport


class History:
    """A run as the reports of its peers tell it.

    Args:
        run_id: of the run.
        reports: of a quorum of its members, or of all who could be waited for.

    Attributes:
        adopted: the member list with which the master goes on.
        members: the same, in ring order, with the names.
        adopted_term: of the last master that led those who report.
        round, round_value: the last round of topology votes that anybody knows.
        outcomes: how attempts ended, by attempt.
    """

    def __init__(self, run_id: bytes, reports: Iterable[RunReport]) -> None:
        of_run = [report for report in reports if report.hello.run_id == run_id]
        self.run_id = run_id
        self.adopted = descend(map(MemberList.of, of_run))
        self.members: tuple[Member, ...] = next(r.members for r in of_run if r.epoch == self.adopted.epoch)
        self.adopted_term = max(report.hello.term for report in of_run)
        self.round = 0
        self.round_value = 0
        self._rounds: dict[bytes, int] = {}  # By member: the last of which it knows.
        self.outcomes: dict[int, Decision] = {}
        self._calls: dict[int, dict[bytes, int]] = {}  # Of attempts that run, or ran, by attempt.
        self._running: list[tuple[bytes, Running]] = []  # By whose word.
        self._last_syncs: dict[int, Decision] = {}  # By group.
        self._newer_syncs: dict[int, Decision] = {}  # Those of them that nobody has taken yet.

        for report in of_run:
            self.add(report)

    def add(self, report: RunReport) -> None:
        """Takes note of one report. Only members know anything of the run."""
        if report.hello.run_id != self.run_id or not report.members:
            return
        if report.round > self.round:
            self.round, self.round_value = report.round, report.round_value
        self._rounds[report.hello.peer_id] = report.round
        for outcome in report.outcomes:
            known = self.outcomes.get(outcome.attempt_id)
            if known is None or len(known.calls) < len(outcome.calls):
                self.outcomes[outcome.attempt_id] = outcome
        reporter = report.hello.peer_id
        for running in report.running:
            self._calls[running.plan.attempt_id] = running.plan.participants
            self._running.append((reporter, running))
        last, group = report.last_sync, report.hello.group
        if last is not None and (group not in self._last_syncs or last.attempt_id > self._last_syncs[group].attempt_id):
            self._last_syncs[group] = self._newer_syncs[group] = last

    def calls_of(self, outcome: Decision) -> dict[bytes, int]:
        """Whom an outcome concerns: by its own word, else by that of those for whom the attempt still runs."""
        if outcome.order:
            return dict(zip(outcome.order, outcome.calls, strict=False))
        return self._calls.get(outcome.attempt_id, {})

    def would_admit(self, report: RunReport, round_here: int) -> bool:
        """True for a newcomer that alone knows of its admission by the former master: to those who are members here.

        Once they have completed that round anew, without it, they are elsewhere in their programs than it is.
        """
        theirs = {member.peer_id for member in report.members}
        is_of_same_master = report.hello.term == self.adopted_term
        is_later = report.epoch > self.adopted.epoch
        is_up_to_date = is_of_same_master and is_later and report.round > round_here
        return is_up_to_date and bool(self.adopted.members) and self.adopted.members <= theirs

    def left_behind(self, present: Container[bytes]) -> list[bytes]:
        """Who knows nothing of the round before the last one, in which all members of then had voted.

        The former master had removed it. It is elsewhere in its program than the others are: the value of a later
        round, which may have been one of other calls, would lead it astray, and all would wait for each other.
        """
        return [peer_id for peer_id, number in self._rounds.items() if number < self.round - 1 and peer_id in present]

    def overtaken(self, present: Container[bytes]) -> list[tuple[bytes, int, Decision]]:
        """Who reports that an attempt runs which has ended for others, without it: who, its call, and the end."""
        found = []
        for reporter, running in self._running:
            outcome = self.outcomes.get(running.plan.attempt_id)
            call_id = running.plan.participants.get(reporter)
            if outcome is None or call_id is None or reporter not in present:
                continue
            if reporter not in self.calls_of(outcome):
                found.append((reporter, call_id, outcome))
        return found

    def take_running(self, present: Container[bytes]) -> list[tuple[bytes, Running]]:
        """Attempts that nobody knows the end of, the oldest first, by the word of each who takes part in the run."""
        taken, self._running = self._running, []
        found = [item for item in taken if item[0] in present and item[1].plan.attempt_id not in self.outcomes]
        return sorted(found, key=lambda item: item[1].plan.attempt_id)

    def take_last_syncs(self) -> dict[int, Decision]:
        """The last committed sync of each group, where it is news."""
        taken, self._newer_syncs = self._newer_syncs, {}
        return taken
