"""What a new master makes of the reports of an earlier master's peers.

    Recovery   collects reports, and the Hellos of newcomers, until enough are there
    choose_run  which run to go on with: that of most reports, where peers of several come to one address
    History     the run as its reports tell it together; a pure value of them, whatever their order

The newest member list that anybody knows is the one to go on with. Its epoch was announced before anything that was
decided in it, on every connection, so who knows of a decision knows who had part in it.

Where peers know several masters, they may be elsewhere, and come and go: only the reports of those who are connected
count, and no grace period ends the wait for a quorum of the newest list (quorum.py). With its report each promises to
obey no master of a lower term than this one will have. So when a quorum has reported, no earlier master can
establish a list any more, and every list that is established is known to one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec

from zpccl import limits
from zpccl.protocol.events import PeerMessageReceived
from zpccl.protocol.messages import Hello, Member, Outcome, Report, RunningAttempt, RunningSync
from zpccl.protocol.quorum import is_quorum

RunningT = TypeVar("RunningT", RunningAttempt, RunningSync)


class Recovery:
    """The reports that have come so far.

    Args:
        now_ns: when the master started.
        grace_ns: how long it waits for further peers after the first, and for a first one when a newcomer waits.
        wait_ns: how long it waits for the reports of peers that were asked for one.
        term: as which it will lead the run.
        run_id: of the run that begins if there is none to go on with.
        begin_ns: before that, newcomers that know other masters begin no run: that of a quorum may come back.
    """

    def __init__(self, now_ns: int, grace_ns: int, wait_ns: int, term: int, run_id: bytes, begin_ns: int = 0) -> None:
        self.term = term
        self._run_id = run_id
        self._begin_ns = begin_ns
        self._grace_ns = grace_ns
        self._wait_ns = wait_ns
        self._greeted_ns: int | None = None
        self._last_greeted_ns = now_ns
        self._started_ns = self._looked_ns = now_ns
        self._reporter_on: dict[Hashable, bytes] = {}
        self._greeted: dict[Hashable, bool] = {}  # Connections of earlier peers, and whether their report is here.
        self.reports: dict[bytes, tuple[PeerMessageReceived, Report]] = {}  # By peer.
        self._held_ns: dict[Hashable, int] = {}
        self._promised: set[bytes] = set()  # Who has reported to this term, and may be elsewhere again.
        self.held: dict[Hashable, PeerMessageReceived] = {}  # The Hellos of newcomers, by connection.
        self.left: dict[bytes, None] = {}

    def on_greeted(self, connection: Hashable, now_ns: int) -> None:
        """A peer of an earlier master has said Hello."""
        self._begin_ns = max(self._begin_ns, now_ns + limits.RUN_MEMORY_NS)
        self._greeted_ns = now_ns if self._greeted_ns is None else self._greeted_ns
        if connection not in self._greeted:
            self._last_greeted_ns = now_ns
        if len(self._greeted) < limits.PEERS_MAX:
            self._greeted.setdefault(connection, False)

    def raise_term(self, term: int) -> list[Hashable]:
        """Others have promised more: what was reported is void. Who must report again."""
        self.term = term
        kept = {p: (e, r) for p, (e, r) in self.reports.items() if r.hello.master_count == 1 or p in self.left}
        self.reports = kept
        self._promised.clear()
        reported = {event.connection for event, _ in self.reports.values()}
        self._greeted = {connection: connection in reported for connection in self._greeted}
        return [connection for connection, has_reported in self._greeted.items() if not has_reported]

    def has_higher_promise(self, hello: Hello) -> bool:
        """True if a peer has promised itself to another master that may lead as this one would, or as a later one."""
        if hello.master_count == 1 or (hello.promised == self.term and hello.peer_id in self._promised):
            return False
        return hello.promised >= self.term

    def knows(self, connection: Hashable) -> bool:
        """True if a connection has said Hello."""
        return connection in self._greeted or connection in self.held

    def hold(self, hello: PeerMessageReceived, now_ns: int) -> bool:
        """A newcomer waits. False if there are too many."""
        if hello.connection not in self.held and len(self.held) >= limits.PENDING_PEERS_MAX:
            return False
        self._greeted.pop(hello.connection, None)  # It was pending, and has nothing to report.
        self.held[hello.connection] = hello
        self._held_ns.setdefault(hello.connection, now_ns)
        return True

    def add(self, event: PeerMessageReceived, report: Report, now_ns: int) -> bool:
        """A report comes, perhaps again. False if it is not that of the peer which reported first, or one too many."""
        peer_id = report.hello.peer_id
        if self._reporter_on.setdefault(event.connection, peer_id) != peer_id:
            return False
        if peer_id in self.reports:
            known = self.reports[peer_id][1].hello
            if known.token != report.hello.token:
                return False
            if known.connection > report.hello.connection:
                return True
        elif len(self.reports) >= limits.PEERS_MAX:
            return False
        self.on_greeted(event.connection, now_ns)
        self.reports[peer_id] = (event, report)
        self._promised.add(peer_id)
        self._greeted[event.connection] = True
        return True

    def rebind(self, event: PeerMessageReceived, hello: Hello) -> bool:
        """True for a peer that has reported and comes back on a new connection: it can have heard nothing since.

        Where there are other masters it can.
        """
        known = self.reports.get(hello.peer_id)
        if known is None or known[1].hello.token != hello.token or known[1].hello.connection > hello.connection:
            return False
        if self._reporter_on.setdefault(event.connection, hello.peer_id) != hello.peer_id:
            return False
        if hello.master_count > 1:
            del self.reports[hello.peer_id]
            return False
        self.reports[hello.peer_id] = (event, msgspec.structs.replace(known[1], hello=hello))
        self._greeted[event.connection] = True
        return True

    def on_left(self, connection: Hashable) -> None:
        """A peer leaves the run."""
        for peer_id, (event, _) in self.reports.items():
            if event.connection == connection:
                self.left[peer_id] = None

    def on_connection_closed(self, connection: Hashable) -> None:
        """Nobody waits there any more. What was said still counts, unless the peer may be at another master now."""
        self._greeted.pop(connection, None)
        self._reporter_on.pop(connection, None)
        self.held.pop(connection, None)
        self._held_ns.pop(connection, None)
        for peer_id, (event, report) in list(self.reports.items()):
            if event.connection == connection and report.hello.master_count > 1 and peer_id not in self.left:
                del self.reports[peer_id]
            elif event.connection == connection:
                self.reports[peer_id] = (replace(event, connection=None), report)

    def deadline_ns(self) -> int | None:
        """When it must be looked at again; None while only an event can change anything."""
        due = [self._reports_due_ns(), *(self._newcomer_due_ns(hello) for hello in self.held.values())]
        return min((due_ns for due_ns in due if due_ns is not None and due_ns > self._looked_ns), default=None)

    def _reports_due_ns(self) -> int | None:
        """How long reports are waited for; None while nobody has any."""
        if self._greeted_ns is None:
            return None
        # Pending peers have seen members: there must be some, who know more.
        is_complete = any(r.members for _, r in self.reports.values()) and all(self._greeted.values())
        wait_ns = max(self._grace_ns, self._wait_ns)
        if is_complete:
            return self._greeted_ns + self._grace_ns
        # Who came late has time for its report too, but not without end: somebody may come ever again.
        return max(
            self._greeted_ns + wait_ns, min(self._last_greeted_ns + self._grace_ns, self._greeted_ns + 2 * wait_ns)
        )

    def _newcomer_due_ns(self, event: PeerMessageReceived) -> int:
        """How long a newcomer waits for members of an earlier run."""
        due_ns, hello = self._started_ns + self._grace_ns, event.message
        assert isinstance(hello, Hello)
        if hello.master_count > 1 and (self._is_to_begin(hello) or self._greeted):
            # Some may be on their way from elsewhere.
            due_ns = max(due_ns, self._held_ns[event.connection] + self._grace_ns)
        elif hello.master_count == 1:
            due_ns = max(due_ns, self._reports_due_ns() or 0)
        return due_ns

    def take_turned_away(self, now_ns: int) -> list[tuple[Hashable, bool]]:
        """Newcomers that know other masters and have waited in vain, and whether members of a run are here."""
        turned_away = []
        for connection, event in list(self.held.items()):
            hello = event.message
            if isinstance(hello, Hello) and hello.master_count > 1 and now_ns >= self._newcomer_due_ns(event):
                del self.held[connection], self._held_ns[connection]
                turned_away.append((connection, bool(self._greeted) or now_ns < self._begin_ns))
        return turned_away

    def is_over(self, now_ns: int) -> bool:
        """True once all of the newest member list have reported, and no newer one can exist; or after the grace.

        Without any reports, once a newcomer may begin a run.
        """
        self._looked_ns = now_ns
        due_ns = self._reports_due_ns()
        is_late = due_ns is not None and now_ns >= due_ns
        if any(peer_id not in self.left for peer_id in self.reports):
            return (is_late or self._are_all_here()) and self._has_quorum()
        if (is_late or not self._greeted) and any(self._may_begin(event, now_ns) for event in self.held.values()):
            return True
        if not self._greeted and (is_late or not self.held):
            self._greeted_ns = None  # They are gone again.
        return False

    def _may_begin(self, event: PeerMessageReceived, now_ns: int) -> bool:
        hello = event.message
        if not isinstance(hello, Hello) or now_ns < self._newcomer_due_ns(event):
            return False
        return hello.master_count == 1 or (self._is_to_begin(hello) and now_ns >= self._begin_ns)

    def _is_to_begin(self, hello: Hello) -> bool:
        """True for a newcomer that has asked all masters since it asked this one: not one in its place before it."""
        return hello.begins == self._run_id

    def _are_all_here(self) -> bool:
        if not all(self._greeted.values()):
            return False
        if len({report.hello.run_id for _, report in self.reports.values()}) > 1:
            return False  # Peers of another run come to this address: those of ours may be the later ones.
        newest = newest_of(report for _, report in self.reports.values())
        theirs = [self.reports.get(member.peer_id) for member in newest.members]
        if not theirs or None in theirs:
            return False
        # Where all wait in update_topology, newcomers may have been admitted of whom only they know.
        return not all(found is not None and found[1].is_updating for found in theirs)

    def _has_quorum(self) -> bool:
        """True if those who have reported may go on with the run, whoever else there is."""
        chosen = choose_run(report for _, report in self.reports.values())
        reports = [report for _, report in self.reports.values() if report.hello.run_id == chosen]
        if all(report.hello.master_count == 1 for report in reports):
            return True
        newest = newest_of(reports)
        present = {report.hello.peer_id for report in reports}.union(self.left)
        # Newcomers that have been admitted and do not know it yet are nowhere else.
        present.update(event.message.peer_id for event in self.held.values() if isinstance(event.message, Hello))
        lists = ([member.peer_id for member in newest.members], newest.old_members)
        return all(is_quorum(present, members) for members in lists)


def newest_of(reports: Iterable[Report]) -> Report:
    """The report with the newest member list; of those who have it, one that knows it to be established."""
    return max(reports, key=lambda report: (report.epoch, not report.old_members))


def choose_run(reports: Iterable[Report]) -> bytes | None:
    """The run that most of the reports are of; of several, the one with the highest epoch. None without reports."""
    votes: Counter[bytes] = Counter()
    epochs: dict[bytes, int] = {}
    for report in reports:
        run_id = report.hello.run_id
        votes[run_id] += 1
        epochs[run_id] = max(epochs.get(run_id, 0), report.epoch)
    return max(votes, key=lambda run_id: (votes[run_id], epochs[run_id], run_id), default=None)


@dataclass(frozen=True)
class Reported(Generic[RunningT]):
    """Something that runs, by the word of a peer."""

    running: RunningT
    reporter: bytes


class History:
    """A run as the reports of its peers tell it.

    Attributes:
        term, epoch, members, old_members, round, round_value: the newest that anybody knows.
        outcomes: how attempts ended, by attempt.
        adopted_epoch, adopted: the epoch and the peers of the member list with which the master went on.
    """

    def __init__(self, run_id: bytes) -> None:
        self.run_id = run_id
        self.term = 0
        self.epoch = 0
        self.adopted_epoch = self.adopted_term = 0
        self.adopted: frozenset[bytes] = frozenset()
        self.members: tuple[Member, ...] = ()
        self.old_members: tuple[bytes, ...] = ()
        self.round = 0
        self.round_value = 0
        self._rounds: dict[bytes, int] = {}  # By member: the last of which it knows.
        self.outcomes: dict[int, Outcome] = {}
        self._calls: dict[int, dict[bytes, int]] = {}  # Of attempts that run, or ran, by attempt.
        self._attempts: list[Reported[RunningAttempt]] = []
        self._syncs: list[Reported[RunningSync]] = []
        self._last_syncs: dict[int, Outcome] = {}  # By group.
        self._newer_syncs: dict[int, Outcome] = {}  # Those of them that nobody has taken yet.

    def adopt(self) -> None:
        """The master goes on with the list that is the newest now."""
        self.adopted_epoch, self.adopted_term = self.epoch, self.term
        self.adopted = frozenset(member.peer_id for member in self.members)

    def add(self, report: Report) -> None:
        """Takes note of one report. Only members know anything of the run."""
        self.term = max(self.term, report.hello.term)
        if report.hello.run_id != self.run_id or not report.members:
            return
        if report.epoch > self.epoch or (report.epoch == self.epoch and not report.old_members):
            self.epoch, self.members, self.old_members = report.epoch, report.members, report.old_members
        if report.round > self.round:
            self.round, self.round_value = report.round, report.round_value
        self._rounds[report.hello.peer_id] = report.round
        for outcome in report.outcomes:
            known = self.outcomes.get(outcome.attempt_id)
            if known is None or len(known.calls) < len(outcome.calls):
                self.outcomes[outcome.attempt_id] = outcome
        reporter = report.hello.peer_id
        for attempt in report.attempts:
            self._calls[attempt.attempt_id] = dict(zip(attempt.order, attempt.calls, strict=False))
            self._attempts.append(Reported(attempt, reporter))
        if report.sync is not None:
            self._calls[report.sync.attempt_id] = dict(zip(report.sync.order, report.sync.calls, strict=False))
            self._syncs.append(Reported(report.sync, reporter))
        last, group = report.last_sync, report.hello.group
        if last is not None and (group not in self._last_syncs or last.attempt_id > self._last_syncs[group].attempt_id):
            self._last_syncs[group] = self._newer_syncs[group] = last

    def calls_of(self, outcome: Outcome) -> dict[bytes, int]:
        """Whom an outcome concerns: by its own word, else by that of those for whom the attempt still runs."""
        if outcome.order:
            return dict(zip(outcome.order, outcome.calls, strict=False))
        return self._calls.get(outcome.attempt_id, {})

    def would_admit(self, report: Report, round_here: int) -> bool:
        """True for a newcomer that alone knows of its admission by the former master: to those who are members here.

        Once they have completed that round anew, without it, they are elsewhere in their programs than it is.
        """
        theirs = {member.peer_id for member in report.members}
        is_of_same_master = report.hello.term == self.adopted_term
        is_later = report.epoch > self.adopted_epoch
        is_up_to_date = is_of_same_master and is_later and report.round > round_here
        return is_up_to_date and bool(self.adopted) and self.adopted <= theirs

    def left_behind(self, present: Container[bytes]) -> list[bytes]:
        """Who knows nothing of the round before the last one, in which all members of then had voted.

        The former master had removed it. It is elsewhere in its program than the others are: the value of a later
        round, which may have been one of other calls, would lead it astray, and all would wait for each other.
        """
        return [peer_id for peer_id, number in self._rounds.items() if number < self.round - 1 and peer_id in present]

    def overtaken(self, present: Container[bytes]) -> list[tuple[bytes, int, Outcome]]:
        """Who reports that an attempt runs which has ended for others, without it: who, its call, and the end."""
        items: list[tuple[bytes, RunningAttempt | RunningSync]] = [(i.reporter, i.running) for i in self._attempts]
        items += [(i.reporter, i.running) for i in self._syncs]
        found = []
        for reporter, running in items:
            outcome = self.outcomes.get(running.attempt_id)
            call_id = dict(zip(running.order, running.calls, strict=False)).get(reporter)
            if outcome is None or call_id is None or reporter not in present:
                continue
            if reporter not in self.calls_of(outcome):
                found.append((reporter, call_id, outcome))
        return found

    def take_attempts(self, present: Container[bytes]) -> list[RunningAttempt]:
        """Attempts that nobody knows the end of, the oldest first, by the word of who takes part in the run."""
        taken, self._attempts = self._attempts, []
        found = {item.running.attempt_id: item.running for item in taken if item.reporter in present}
        return [found[attempt_id] for attempt_id in sorted(found) if attempt_id not in self.outcomes]

    def take_syncs(self, present: Container[bytes]) -> list[Reported[RunningSync]]:
        """Syncs that nobody knows the end of, by the word of each who has the plan and takes part in the run."""
        taken, self._syncs = self._syncs, []
        return [s for s in taken if s.running.attempt_id not in self.outcomes and s.reporter in present]

    def take_last_syncs(self) -> dict[int, Outcome]:
        """The last committed sync of each group, where it is news."""
        taken, self._newer_syncs = self._newer_syncs, {}
        return taken
