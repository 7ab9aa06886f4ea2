"""The state of a run, which a new master merges from the peers' run reports. The order of reports does not matter.

leadership.py decides which member list the master continues with. On every connection a member list is sent before the
decisions of its epoch, so a peer that knows a decision also knows the members that took part.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from zpccl import limits
from zpccl.protocol.leadership import MemberList, descend
from zpccl.protocol.memory import has_decided
from zpccl.protocol.messages import Decision, Member, Running, RunReport, since_of


class _Known(NamedTuple):
    """What a peer reports: the term in which it was led, the epoch of its list, and of the list that admitted it."""

    term: int
    epoch: int
    since: int


class History:
    """The state of a run, merged from the reports of its peers.

    Args:
        run_id: the id of the run.
        reports: from a quorum of its members, or from the members that reported in time. They show which list to
            continue with. Their other content counts only once `add` has taken it, which is for members of that list.

    Attributes:
        adopted: the member list that the master continues with.
        members: the members of that list, in ring order, with their names.
        adopted_term: the highest term in which a reporting peer was led.
        round, round_value: the last complete round of topology votes that a member knows.
        outcomes: how attempts ended, by attempt id.
        has_decided: True if any peer knows of an operation that was planned or decided.
    """

    def __init__(self, run_id: bytes, reports: Iterable[RunReport]) -> None:
        of_run = [report for report in reports if report.hello.run_id == run_id]
        self.run_id = run_id
        self.adopted = descend(map(MemberList.of, of_run))
        self.adopted_term = max((report.hello.term for report in of_run if report.members), default=0)
        self.has_decided = False
        self._reports: dict[bytes, RunReport] = {}  # The added reports, by reporting peer.
        self._reporters: list[bytes] = []  # Reporting peers that take_reporters has not returned yet.
        self._lists: dict[bytes, _Known] = {}  # By member.
        self._members_of: dict[int, frozenset[bytes]] = {}  # By epoch.
        self._admitted: dict[bytes, int] = {}  # By member: the epoch of the last list that any peer knows to admit it.
        self._last_attempt_id = 0  # Of all attempts that any peer reports, running or ended.
        self._calls: dict[int, dict[bytes, int]] = {}  # By attempt: its participants and their call ids.
        self._running: list[tuple[bytes, Running]] = []  # With the id of the reporting peer.
        self._taken_syncs: dict[int, Decision] = {}  # What take_last_syncs has returned, by group.
        self._forget_facts()

        for report in of_run:
            self._note(report)
        self._gone: list[bytes] = []  # Members of the newest list that are to be removed.
        if all(len(report.hello.masters) <= 1 for report in of_run):  # With several, quorums made all removals.
            self._gone = self.parted(dict.fromkeys(self.adopted.members, 0))
            self.adopted = descend(MemberList.of(r) for r in of_run if r.hello.peer_id not in self._gone)
        self.members: tuple[Member, ...] = next(r.members for r in of_run if r.epoch == self.adopted.epoch)

    def _forget_facts(self) -> None:
        self.round, self.round_value = 0, 0
        self.outcomes: dict[int, Decision] = {}
        self._last_syncs: dict[int, Decision] = {}  # By group.

    def _note(self, report: RunReport) -> None:
        """Notes which list a peer knows, and whether anything has been decided. It may no longer be a member."""
        if not report.members:
            return
        reporter = report.hello.peer_id
        since = since_of(report.members, reporter) if report.hello.is_member else 0
        self._lists[reporter] = _Known(report.hello.term, report.epoch, since)
        if report.epoch not in self._members_of:
            self._members_of[report.epoch] = frozenset(member.peer_id for member in report.members)
            for member in report.members:
                self._admitted[member.peer_id] = max(member.since, self._admitted.get(member.peer_id, 0))
        attempts = [outcome.attempt_id for outcome in report.outcomes]
        attempts += [running.plan.attempt_id for running in report.running]
        if report.last_sync is not None:
            attempts.append(report.last_sync.attempt_id)
        self._last_attempt_id = max(self._last_attempt_id, *attempts, 0)
        self.has_decided = self.has_decided or has_decided(report)

    def add(self, report: RunReport) -> None:
        """Merges the report of a member. A report without a member list contains nothing about the run."""
        if report.hello.run_id != self.run_id or not report.members:
            return
        self._note(report)
        reporter = report.hello.peer_id
        outcomes = tuple(map(self._kept, report.outcomes))
        self._reports[reporter] = replace(report, outcomes=outcomes, running=())
        self._reporters.append(reporter)
        for running in report.running:
            self._calls[running.plan.attempt_id] = running.plan.participants
            self._running.append((reporter, running))
        self._merge(report)

    def _kept(self, outcome: Decision) -> Decision:
        """The equal outcome of an earlier report, if there is one: each names all members, and all report the same."""
        known = self.outcomes.get(outcome.attempt_id)
        return known if known is not None and known == outcome else outcome

    def _merge(self, report: RunReport) -> None:
        if (report.round, report.round_value) > (self.round, self.round_value):
            self.round, self.round_value = report.round, report.round_value
        for outcome in report.outcomes:
            known = self.outcomes.get(outcome.attempt_id)
            if known is None or len(known.calls) < len(outcome.calls):
                self.outcomes[outcome.attempt_id] = outcome
        last, group = report.last_sync, report.hello.group
        if last is not None and (group not in self._last_syncs or last.attempt_id > self._last_syncs[group].attempt_id):
            self._last_syncs[group] = last

    def drop(self, gone: Container[bytes]) -> None:
        """Drops the reports of peers that are to be removed: the others have gone on without them.

        These peers may know rounds, outcomes and syncs of a branch of the run that does not continue. There they may
        have left attempts that the others are still in.
        """
        if not any(reporter in gone for reporter in self._reports):
            return
        self._reports = {reporter: report for reporter, report in self._reports.items() if reporter not in gone}
        self._running = [item for item in self._running if item[0] not in gone]
        self._reporters = [reporter for reporter in self._reporters if reporter not in gone]
        self._forget_facts()
        for report in self._reports.values():
            self._merge(report)

    def has_told(self, number: int) -> bool:
        """True if a member knows this round of topology votes, the last one here, only from this master."""
        return any(report.round < number for report in self._reports.values())

    def calls_of(self, outcome: Decision) -> dict[bytes, int]:
        """The participants of an outcome with call ids: from the outcome, or from reports of the running attempt."""
        if outcome.order:
            return dict(zip(outcome.order, outcome.calls, strict=False))
        return self._calls.get(outcome.attempt_id, {})

    def would_admit(self, report: RunReport, round_here: int, *, keeps_all: bool) -> bool:
        """True for a newcomer that the former master admitted to the adopted members, if none of them knows of it.

        With `keeps_all`, the list that admitted it must contain all adopted members. False once the members have
        completed that round again without it: their programs are at another point by then.
        """
        if report.hello.peer_id in self._gone:
            return False
        theirs = {member.peer_id for member in report.members}
        is_of_same_master = report.hello.term == self.adopted_term
        is_later = report.epoch > self.adopted.epoch
        is_up_to_date = is_of_same_master and is_later and report.round > round_here
        is_listed = report.hello.peer_id in theirs  # If not, it has acknowledged a list without itself.
        is_whole = not keeps_all or self.adopted.members <= theirs
        return is_up_to_date and is_listed and bool(self.adopted.members) and is_whole

    def parted(
        self, present: Mapping[bytes, int], late: bytes | None = None, absent: Collection[bytes] = ()
    ) -> list[bytes]:
        """Present members to remove, because a former single master had removed members that then reported first.

        The next master adopted a list from the removed members. That list and the list of the others do not follow
        each other, so the two sides are at different points of their programs. Lists of one term do follow each other.
        The newest list comes first. One that all of its members have left decides nothing, and the next older one may
        tell of a removal, too. The removed members go, unless something was decided since under the list that was
        adopted from them: then the members that know the other list go.

        If the members that know of the removal stay, removed ones that are still to report go at once. Otherwise the
        members would be sent a list with these, and if this master then died, they would report that list alone.

        Args:
            present: the peers that are here, or members of the list to continue with; each with the epoch of the list
                that admitted it, or 0. That counts if the peer has reported no list: it has not heard of its admission.
            late: a peer that came after this master had gone on: it goes, whichever side it is on.
            absent: members that are still to report.
        """
        left = {peer_id: self._lists.get(peer_id, _Known(0, 0, since)) for peer_id, since in present.items()}
        found: list[bytes] = []
        listed: dict[int, set[bytes]] = {}  # By term: members of this list and later ones, which may list a peer again.
        for epoch in sorted(self._members_of, reverse=True):
            term = epoch >> limits.EPOCH_BITS
            members = listed.setdefault(term, set())
            members |= self._members_of[epoch]
            removed = [i for i, known in left.items() if i not in members and 0 < known.since < epoch]
            # If all who have heard of the removal have gone, it counts no more.
            of_term = [i for i, known in left.items() if known.epoch >> limits.EPOCH_BITS == term]
            knowing = [i for i in of_term if left[i].epoch >= epoch and i not in removed]
            kept_or_gone = members.union(found)
            unheard = [i for i in absent if i not in kept_or_gone and self._admitted.get(i, 0) < epoch]
            if not (removed or unheard) or not knowing:
                continue
            their_term = min(left[i].term for i in knowing)
            is_decided = self._last_attempt_id >> limits.EPOCH_BITS > their_term
            gone = knowing if is_decided and removed else removed
            if late is not None:  # All others go on together; the list may be that of a late peer that had to go.
                gone = [late] if removed and late in removed + knowing else []
            found += gone
            if knowing[0] not in found:
                found += unheard
            left = {peer_id: known for peer_id, known in left.items() if peer_id not in found}
        return found

    def overtaken(self, present: Container[bytes]) -> list[tuple[bytes, int, Decision]]:
        """Present peers that report a running attempt which ended without them: peer id, call id, outcome."""
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
        """Attempts without a known outcome, oldest first, each with the id of a present peer that reported it."""
        taken, self._running = self._running, []
        found = [item for item in taken if item[0] in present and item[1].plan.attempt_id not in self.outcomes]
        return sorted(found, key=lambda item: item[1].plan.attempt_id)

    def take_reporters(self) -> list[bytes]:
        """The peers whose reports have been added since the last call."""
        taken, self._reporters = self._reporters, []
        return taken

    def take_last_syncs(self) -> dict[int, Decision]:
        """The last committed sync of each group, unless the last call returned the same one."""
        changed = {group: last for group, last in self._last_syncs.items() if self._taken_syncs.get(group) != last}
        self._taken_syncs.update(changed)
        return changed


def is_plausible(report: RunReport) -> bool:
    """False if no honest peer sends this report: epochs and terms do not fit, a member is listed twice, or a plan lacks
    a call.

    The promise is of a later term than the hello, unless a candidate has just welcomed the peer, which has no list.
    """
    members, hello = {member.peer_id for member in report.members}, report.hello
    is_of_term = (
        max((report.parent, *(member.since for member in report.members))) <= report.epoch
        and report.epoch >> limits.EPOCH_BITS <= hello.term
        and (hello.term < hello.promised or (hello.term == hello.promised and not report.members))
    )
    plans = [running.plan for running in report.running]
    are_whole = all(len(plan.calls) == len(plan.order) == len(plan.participants) for plan in plans)
    return is_of_term and len(members) == len(report.members) and are_whole
