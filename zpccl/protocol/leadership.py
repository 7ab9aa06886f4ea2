"""Leadership: which master may decide for a run. The rules, their names and the proof: docs/leadership.md.

    peer      Acceptor    promise, obey, accept
    master    Candidate   collects promises until it is elected, or may begin a new run
              Leader      propose, commit, step down

The members of the last committed list are the acceptors. A candidate asks members of an earlier run for a run report,
which is also a promise of (term, leader). It holds the Hellos of all other peers until it leads. To a candidate, a
connection is

    event                       new        held             summoned     asked        reported
    Hello of a member           asked      asked            asked again  asked again  reported [1]
    Hello of another peer       held       held             asked again  held         reported [1]
    a report lists it [2]       -          summoned         -            -            -
    RunReport                   reported   reported         reported     reported     reported
    a higher term is taken      -          held             held         asked again  asked again
    it has waited long enough   -          turned away [3]  -            -            -

    [1] If it has promised exactly this leadership; otherwise asked again. [2] As a member of the list to continue with.
    [3] If it knows other masters; otherwise it may begin a run.

The phases of the master itself: master.py.

In a run with one address a list is committed as soon as it is proposed. A candidate that has no quorum after
MINORITY_WAIT_NS adopts the run from the reports that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from zpccl import limits
from zpccl.protocol.events import PeerMessageReceived
from zpccl.protocol.losses import reconnect_grace_ns
from zpccl.protocol.memory import has_decided
from zpccl.protocol.messages import NO_ID, Hello, RunReport


class Promise(NamedTuple):
    """One leadership: its term and the id that its master drew. A peer promises a term to one leadership at most."""

    term: int = 0
    leader: bytes = NO_ID

    @classmethod
    def of(cls, hello: Hello) -> Promise:
        """The promise that a Hello contains."""
        return cls(hello.promised, hello.leader)


class MemberList(NamedTuple):
    """A member list.

    Attributes:
        epoch: its number: the term of the leader that proposed it, and a count.
        parent: the epoch of the last committed list when it was proposed.
        old_members: the members of the parent; empty once the list is known to be committed.
    """

    epoch: int = 0
    members: frozenset[bytes] = frozenset()
    parent: int = 0
    old_members: frozenset[bytes] = frozenset()

    @property
    def is_committed(self) -> bool:
        """True if the list is known to be committed."""
        return not self.old_members

    @classmethod
    def of(cls, report: RunReport) -> MemberList:
        """The list that a peer has accepted."""
        members = frozenset(member.peer_id for member in report.members)
        return cls(report.epoch, members, report.parent, frozenset(report.old_members))


def is_quorum(present: Container[bytes], members: Collection[bytes]) -> bool:
    """True if those present are a majority of the members, or half of them with the lowest id. True for no members."""
    count = sum(peer_id in present for peer_id in members)
    return 2 * count > len(members) or (2 * count == len(members) and (not members or min(members) in present))


def are_quorums(present: Container[bytes], accepted: MemberList) -> bool:
    """True if those present are a quorum of a list and, while it is not committed, also of its old members."""
    return is_quorum(present, accepted.members) and is_quorum(present, accepted.old_members)


def is_new(hello: Hello) -> bool:
    """True for a peer that has not heard of any run: it has promised nothing."""
    return hello.run_id == NO_ID and hello.leader == NO_ID and not hello.is_member


def is_sole(peer_id: bytes, accepted: MemberList) -> bool:
    """True if a peer is the only member of a list and of its old members: no quorum can do without it."""
    return accepted.members | accepted.old_members == {peer_id}


def descend(lists: Iterable[MemberList]) -> MemberList:
    """Rule "descend": chooses the list to continue with from those that peers have accepted.

    It is the newest list that descends from the last list known to be committed. A higher epoch alone decides nothing.
    A later list with the same members counts too: its leader repeated that list and did not know it was committed.
    """
    known = list(lists)
    last = max(each.epoch if each.is_committed else each.parent for each in known)
    children = [each for each in known if last in (each.epoch, each.parent)]
    members = children[0].members if children[0].epoch == last else children[0].old_members
    descendants = (each for each in known if each in children or (each.epoch > last and each.members == members))
    return max(descendants, key=lambda each: (each.epoch, each.is_committed))


# --- Of peers -------------------------------------------------------------------------------------------------------


class Acceptor:
    """What a peer has promised, and whether it obeys the master of its current connection.

    Attributes:
        promised: the only leadership that it obeys.
        is_led: True once that leader has welcomed it on this connection.
    """

    def __init__(self) -> None:
        self.promised = Promise()
        self.is_led = False

    def promise(self, asked: Promise) -> bool:
        """Rule "promise": True if it is granted. Then messages of earlier leaders on this connection are ignored."""
        if asked.term <= self.promised.term and asked != self.promised:
            return False
        self.promised, self.is_led = asked, False
        return True

    def obey(self, leader: Promise) -> bool:
        """Rule "obey": True if a Welcome is from the promised leadership. From then on its messages are obeyed."""
        self.is_led = leader == self.promised
        return self.is_led

    def may_be_registered(self, leader: Promise) -> bool:
        """False for a leader of its run that is earlier than the one it has promised: a list may count that promise."""
        return leader == self.promised or leader.term > self.promised.term

    def register(self, leader: Promise) -> None:
        """A master has registered this peer, which is not a member. Before that, a peer promises nothing."""
        self.promised, self.is_led = leader, True

    def release(self) -> None:
        """The run of this peer goes on without it, or has yielded: no list counts its promise any more."""
        self.promised, self.is_led = Promise(), False

    def accepts(self, epoch: int, accepted_epoch: int) -> bool:
        """Rule "accept": True for a list of the promised term, unless a later one was accepted."""
        return self.is_led and epoch >> limits.EPOCH_BITS == self.promised.term and epoch >= accepted_epoch

    def on_disconnected(self) -> None:
        """On the next connection the master has to send its Welcome first."""
        self.is_led = False


# --- Of the leading master ------------------------------------------------------------------------------------------


class Leader:
    """The member list of a leadership, and the acknowledgements that commit it.

    Args:
        promise: the leadership.
        needs_quorum: False in a run with one address, where every proposed list is committed.
        adopted: the list that it continues with; None in a new run.
    """

    def __init__(self, promise: Promise, *, needs_quorum: bool, adopted: MemberList | None = None) -> None:
        self.promise = promise
        self.needs_quorum = needs_quorum
        self.list = adopted or MemberList()
        self._repeats = adopted is not None  # Until the list that repeats the adopted one is committed.
        self._acknowledged: set[bytes] = set()
        self._left: set[bytes] = set()

    @property
    def may_change(self) -> bool:
        """False until the list that repeats the adopted one is committed: a later list may need its quorum."""
        return not (self._repeats and self.needs_quorum)

    def propose(self, epoch: int, members: Iterable[bytes]) -> None:
        """Rule "propose": the list descends from the last committed one. The first list repeats the adopted one."""
        assert epoch > self.list.epoch
        parent, old_members = self.list.parent, self.list.old_members
        if self.list.is_committed:
            parent, old_members = self.list.epoch, self.list.members
        self.list = MemberList(epoch, frozenset(members), parent, old_members if self.needs_quorum else frozenset())
        self._acknowledged.clear()

    def acknowledge(self, peer_id: bytes, epoch: int) -> bool:
        """A member has accepted the list of an epoch. True if that commits the current list."""
        if epoch != self.list.epoch:
            return False
        self._acknowledged.add(peer_id)
        return self._commit()

    def on_left(self, peer_id: bytes) -> bool:
        """A member sent Leave, so it will promise no other master. True if that commits the current list."""
        if self.needs_quorum:
            self._left.add(peer_id)
        return self._commit()

    def _commit(self) -> bool:
        """Rule "commit"."""
        if self.list.is_committed or not are_quorums(self._acknowledged | self._left, self.list):
            return False
        self.list = self.list._replace(old_members=frozenset())
        self._repeats = False
        self._left &= self.list.members  # The others belong to no later list.
        return True

    def may_lead(self, present: Iterable[bytes]) -> bool:
        """Rule "step down": False if those present cannot commit the next list without the absent members."""
        if not self.needs_quorum:
            return True
        known = self._left.union(present)
        if self._repeats:
            return are_quorums(known, self.list)
        return is_quorum(known, self.list.members if self.list.is_committed else self.list.old_members)


# --- Of masters that do not lead ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Held:
    """A newcomer or a pending peer, while no master leads."""

    event: PeerMessageReceived
    hello: Hello
    """The message of the event."""
    since_ns: int
    is_summoned: bool = False
    """True once it was asked for a report, because another peer's report names it as a member."""


class Candidate:
    """Collects the promises of members of an earlier run, and the Hellos of other peers.

    Args:
        now_ns: when the master started to recover. If it has stood still, newcomers wait again as after a start.
        grace_ns: how long it waits for further peers after the first one, and for a first one while a newcomer waits.
        wait_ns: how long it waits for reports that it has requested.
        promise: the leadership that it asks for.
        run_id: the id of the run that it begins if there is none to adopt.
        begin_ns: until then newcomers that know other masters begin no run: a quorum of an earlier run may return.
    """

    def __init__(
        self, now_ns: int, grace_ns: int, wait_ns: int, promise: Promise, run_id: bytes, begin_ns: int = 0
    ) -> None:
        self.promise = promise
        self._run_id = run_id
        self._begin_ns = begin_ns
        self._grace_ns = grace_ns
        self._wait_ns = wait_ns
        self._greeted_ns: int | None = None
        self._told_ns: int | None = None  # When the first peer that had been pending in a run came.
        self._last_greeted_ns = now_ns
        self._elected_ns: int | None = None  # Since when it could lead and waits only for connected members.
        self._started_ns = self._looked_ns = now_ns
        self._reporter_on: dict[Hashable, bytes] = {}
        self._greeted: dict[Hashable, bool] = {}  # Connections of members, and whether they have reported.
        self.reports: dict[bytes, tuple[PeerMessageReceived, RunReport]] = {}  # By peer.
        self.held: dict[Hashable, Held] = {}  # Newcomers and pending peers, by connection.
        self.left: dict[bytes, None] = {}
        self._revoked: dict[bytes, str] = {}  # By peer that had reported: the name of its key.

    def on_greeted(self, connection: Hashable, now_ns: int) -> None:
        """A member of an earlier run has sent a Hello."""
        self._begin_ns = max(self._begin_ns, now_ns + limits.RUN_MEMORY_NS)
        self._greeted_ns = now_ns if self._greeted_ns is None else self._greeted_ns
        if connection not in self._greeted:
            self._last_greeted_ns = now_ns
        if len(self._greeted) < limits.PEERS_MAX:
            self._greeted.setdefault(connection, False)

    def is_below(self, hello: Hello) -> bool:
        """True if a peer has promised another leadership of this term or a higher one."""
        return hello.promised >= self.promise.term and Promise.of(hello) != self.promise

    def raise_term(self, term: int) -> list[Hashable]:
        """Takes a higher term, which voids the promises so far. Returns the connections to ask again."""
        self.promise = self.promise._replace(term=term)
        self.reports = {peer_id: self.reports[peer_id] for peer_id in self.left if peer_id in self.reports}
        for held in self.held.values():
            held.is_summoned = False
        self._greeted = dict.fromkeys(self._greeted, False)
        self._elected_ns = None
        return list(self._greeted)

    def knows(self, connection: Hashable) -> bool:
        """True if a Hello has arrived on a connection."""
        return connection in self._greeted or connection in self.held

    def expects_report(self, connection: Hashable) -> bool:
        """True if the peer was held and then asked for a report, or has reported."""
        held = self.held.get(connection)
        return held.is_summoned if held is not None else self._greeted.get(connection, False)

    def owing(self) -> frozenset[Hashable]:
        """The connections on which a report is on its way."""
        greeted = {connection for connection, has_reported in self._greeted.items() if not has_reported}
        return frozenset(greeted.union(connection for connection, held in self.held.items() if held.is_summoned))

    def connections(self) -> list[Hashable]:
        """The connections of members of an earlier run."""
        return list(self._greeted)

    def hold(self, event: PeerMessageReceived, hello: Hello, now_ns: int) -> bool:
        """Holds the Hello of a peer that is not a member. False if too many are held."""
        known = self.held.get(event.connection)
        if known is None and len(self.held) >= limits.PENDING_PEERS_MAX:
            return False
        if hello.run_id != NO_ID and self._told_ns is None:
            self._told_ns = now_ns
        self._greeted.pop(event.connection, None)
        self.held[event.connection] = Held(event, hello, known.since_ns if known is not None else now_ns)
        return True

    def summon(self) -> list[Hashable]:
        """Connections of held peers to ask for a report: members of the list to continue with that do not know it.

        They count for the quorum like other members, once they have promised. One of several masters also asks members
        that no run has registered, as far as they know: it may need their promise, and no other run has it.
        """
        if not self.held or self.chosen is None:
            return []
        chosen = self.chosen
        newest = self._newest(chosen)
        members, found = newest.members | newest.old_members, []
        for connection, held in self.held.items():
            is_of_run = held.hello.run_id == chosen or (is_new(held.hello) and len(held.hello.masters) > 1)
            if not held.is_summoned and is_of_run and held.hello.peer_id in members:
                held.is_summoned = True
                found.append(connection)
        return found

    def add(self, event: PeerMessageReceived, report: RunReport, now_ns: int) -> bool:
        """Adds or replaces a report. False if the connection or token is another peer's, or reports are too many."""
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
        self.held.pop(event.connection, None)
        self._revoked.pop(peer_id, None)  # Its key is allowed again.
        self.on_greeted(event.connection, now_ns)
        self._wait_ns = reconnect_grace_ns(report.hello.handshake_ms, self._wait_ns)  # Other peers may be as far away.
        self.reports[peer_id] = (event, report)
        self._greeted[event.connection] = True
        return True

    def rebind(self, event: PeerMessageReceived, hello: Hello) -> bool:
        """Moves a report to the new connection of its peer. False without a report, or if the promise has changed."""
        known = self.reports.get(hello.peer_id)
        if known is None or known[1].hello.token != hello.token or known[1].hello.connection > hello.connection:
            return False
        if Promise.of(hello) != self.promise:
            return False
        if self._reporter_on.setdefault(event.connection, hello.peer_id) != hello.peer_id:
            return False
        self._revoked.pop(hello.peer_id, None)
        self.reports[hello.peer_id] = (event, msgspec.structs.replace(known[1], hello=hello))
        self._greeted[event.connection] = True
        return True

    def revoke(self, names: Mapping[str, str]) -> list[Held]:
        """Keys were revoked. Peers that have reported count, and are removed later. Forgets and returns held peers."""
        reporters = {peer_id: event.identity for peer_id, (event, _) in self.reports.items()}
        self._revoked = self.revoked | {peer_id: names[key] for peer_id, key in reporters.items() if key in names}
        found = [held for held in self.held.values() if held.event.identity in names]
        for held in found:
            self.on_connection_closed(held.event.connection)
        return found

    @property
    def revoked(self) -> dict[bytes, str]:
        """Peers that have reported and whose keys were revoked since, each with the name of its key."""
        return {peer_id: name for peer_id, name in self._revoked.items() if peer_id in self.reports}

    def on_left(self, connection: Hashable) -> None:
        """A peer leaves the run: it will promise no other master."""
        for peer_id, (event, _) in self.reports.items():
            if event.connection == connection:
                self.left[peer_id] = None

    def on_connection_closed(self, connection: Hashable) -> None:
        """Forgets a connection. If its peer may be connected to another master now, its report is dropped."""
        self._greeted.pop(connection, None)
        self._reporter_on.pop(connection, None)
        self.held.pop(connection, None)
        for peer_id, (event, report) in list(self.reports.items()):
            if event.connection != connection:
                continue
            if len(report.hello.masters) > 1 and peer_id not in self.left:
                del self.reports[peer_id]
            else:
                self.reports[peer_id] = (replace(event, connection=None), report)

    # --- Times ------------------------------------------------------------------------------------------------------

    def deadline_ns(self) -> int | None:
        """When the next Tick is due; None while only another event can change anything."""
        due = [self._reports_due_ns(), self._minority_due_ns(), self._late_due_ns(), self._started_ns + self._grace_ns]
        due += map(self._newcomer_due_ns, self.held.values())
        return min((due_ns for due_ns in due if due_ns is not None and due_ns > self._looked_ns), default=None)

    def _reports_due_ns(self) -> int | None:
        """Until when it waits for reports; None while no peer has to report."""
        if self._greeted_ns is None:
            return None
        wait_ns = max(self._grace_ns, self._wait_ns)
        if self.reports and all(self._greeted.values()):
            return self._greeted_ns + self._grace_ns
        # Late peers get time for their reports too, but bounded, since there may always be one more.
        return max(
            self._greeted_ns + wait_ns, min(self._last_greeted_ns + self._grace_ns, self._greeted_ns + 2 * wait_ns)
        )

    def _late_due_ns(self) -> int | None:
        """Until when it waits, once elected in a run with one address, for connected members that have not reported.

        They may know a later list. Each gets its own time, but the total is bounded.
        """
        if self._elected_ns is None or all(self._greeted.values()):
            return None
        latest_ns = self._elected_ns + 2 * max(self._grace_ns, self._wait_ns)
        return min(self._last_greeted_ns + self._grace_ns, latest_ns)

    def _minority_due_ns(self) -> int | None:
        """Until when it waits for a quorum, in a run with one address."""
        return None if self._greeted_ns is None else self._greeted_ns + limits.MINORITY_WAIT_NS

    def _newcomer_due_ns(self, held: Held) -> int:
        """Until when a newcomer waits for members of an earlier run."""
        due_ns, hello = self._started_ns + self._grace_ns, held.hello
        if len(hello.masters) > 1 and (self._is_to_begin(hello) or self._greeted):
            # Members may be about to switch from another master to this one.
            due_ns = max(due_ns, held.since_ns + self._grace_ns)
        elif len(hello.masters) <= 1:
            due_ns = max(due_ns, self._reports_due_ns() or 0)
            # A peer that was pending in a run shows that the run has members. No new peer may begin a run before them.
            told_ns = held.since_ns if hello.run_id != NO_ID else self._told_ns
            due_ns = max(due_ns, 0 if told_ns is None else told_ns + self._wait_ns)
        return due_ns

    # --- Its end ----------------------------------------------------------------------------------------------------

    def take_turned_away(self, now_ns: int) -> list[tuple[Hashable, bool]]:
        """Removes newcomers that know other masters and waited long enough. True: members of a run came or may come."""
        turned_away = []
        for connection, held in list(self.held.items()):
            if len(held.hello.masters) > 1 and not held.is_summoned and now_ns >= self._newcomer_due_ns(held):
                del self.held[connection]
                turned_away.append((connection, bool(self._greeted) or now_ns < self._begin_ns))
        return turned_away

    def due_newcomers(self, now_ns: int) -> list[Held]:
        """Newcomers that need not wait any longer for members of an earlier run; none once a member has reported."""
        if self._have_members_reported() or (self._greeted and not self._is_late(now_ns)):
            return []
        return [held for held in self.held.values() if now_ns >= self._newcomer_due_ns(held)]

    def _have_members_reported(self) -> bool:
        return any(report.members and peer_id not in self.left for peer_id, (_, report) in self.reports.items())

    def _is_late(self, now_ns: int) -> bool:
        due_ns = self._reports_due_ns()
        return due_ns is not None and now_ns >= due_ns

    def is_over(self, now_ns: int) -> bool:
        """True once it is elected and all members of the list have reported or had time to.

        If no member has reported: True once a newcomer may begin a run.
        """
        due_ns = self.deadline_ns()
        if due_ns is not None and now_ns > due_ns + limits.LATE_TICK_NS:
            self._started_ns = now_ns  # It stood still, and may not have read the Hellos of members yet.
        self._looked_ns = now_ns
        is_late = self._is_late(now_ns)
        if self._have_members_reported():
            return (is_late or self._are_all_here()) and self._is_elected(now_ns) and not self._awaits_late(now_ns)
        if (is_late or not self._greeted) and any(self._may_begin(held, now_ns) for held in self.held.values()):
            if self.chosen is not None and not self._has_quorum(self.chosen):
                self._forget_those_who_left()
            return True
        if not self._greeted and (is_late or not self.held):
            self._greeted_ns = None  # They have disconnected.
        return False

    def _forget_those_who_left(self) -> None:
        """Forgets their reports: they elect nobody. The other members may have gone on with a later list."""
        self.reports = {peer_id: known for peer_id, known in self.reports.items() if peer_id not in self.left}
        self.left.clear()

    def _is_elected(self, now_ns: int) -> bool:
        """Rule "elect". Every report is a promise of exactly this leadership."""
        chosen, due_ns = self.chosen, self._minority_due_ns()
        if self._has_quorum(chosen):
            return True
        return self._has_one_address(chosen) and due_ns is not None and now_ns >= due_ns

    def _awaits_late(self, now_ns: int) -> bool:
        """True while late members may report a later list. With several masters the quorums rule that out."""
        if self._elected_ns is None and self._has_one_address(self.chosen):
            self._elected_ns = now_ns
        due_ns = self._late_due_ns()
        return due_ns is not None and now_ns < due_ns

    def _has_quorum(self, run_id: bytes | None) -> bool:
        """True if quorums of the newest list of a run have promised."""
        reports = self._reports_of(run_id)
        promised = {report.hello.peer_id for report in reports}.union(self.left)
        return are_quorums(promised, self._newest(run_id))

    def _has_one_address(self, run_id: bytes | None) -> bool:
        """True if the members of a run know no other master."""
        return all(len(report.hello.masters) <= 1 for report in self._reports_of(run_id))

    def may_count(self, hello: Hello) -> bool:
        """True if a list may count the promise of a held peer: as far as is known, its run has several masters."""
        return len(hello.masters) > 1 and not (self._have_members_reported() and self._has_one_address(self.chosen))

    @property
    def chosen(self) -> bytes | None:
        """The run to adopt; None if no report contains a member list.

        A run counts only while one of those who have reported it has not left, unless no such run remains. A run that
        has decided nothing yields to one that has, as it does while it is led. For this, a quorum of the other run must
        be here, and its members must know one master only.
        """
        here = {report.hello.run_id for peer_id, (_, report) in self.reports.items() if peer_id not in self.left}
        known = [report for _, report in self.reports.values() if report.members]
        reports = [report for report in known if report.hello.run_id in here]
        decided = {report.hello.run_id for report in reports if has_decided(report)}
        rivals = [report for report in reports if report.hello.run_id not in decided]
        if rivals and any(self._has_quorum(run_id) and self._has_one_address(run_id) for run_id in decided):
            reports = [report for report in reports if report.hello.run_id in decided]
        return choose_run(reports or known)

    def _reports_of(self, run_id: bytes | None) -> list[RunReport]:
        return [report for _, report in self.reports.values() if report.hello.run_id == run_id]

    def _newest(self, run_id: bytes | None) -> MemberList:
        return descend(map(MemberList.of, self._reports_of(run_id)))

    def _may_begin(self, held: Held, now_ns: int) -> bool:
        is_alone = len(held.hello.masters) <= 1
        is_due = now_ns >= self._newcomer_due_ns(held)
        return is_due and (is_alone or (self._is_to_begin(held.hello) and now_ns >= self._begin_ns))

    def _is_to_begin(self, hello: Hello) -> bool:
        """True for a newcomer that found no run at any master, and asked this process, not an earlier one here."""
        return hello.begins == self._run_id

    def _are_all_here(self) -> bool:
        if not all(self._greeted.values()) or self._has_one_address(self.chosen):
            return False  # With one address all of them may have been lost, and the run may have gone on with others.
        if len({report.hello.run_id for _, report in self.reports.values()}) > 1:
            return False  # Peers of several runs connect here: those of the right run may come later.
        newest = self._newest(self.chosen)
        theirs = [self.reports.get(peer_id) for peer_id in newest.members]
        return bool(theirs) and None not in theirs


def choose_run(reports: Iterable[RunReport]) -> bytes | None:
    """The run with most reports of members; of several such runs, that with the highest epoch. None without reports.

    Reports of peers outside the list to continue with do not count: those peers were removed.
    """
    of_runs: dict[bytes, list[RunReport]] = {}
    for report in reports:
        of_runs.setdefault(report.hello.run_id, []).append(report)

    def weight(run_id: bytes) -> tuple[int, int, bytes]:
        of_run = of_runs[run_id]
        members = descend(map(MemberList.of, of_run)).members
        return sum(report.hello.peer_id in members for report in of_run), max(r.epoch for r in of_run), run_id

    return max(of_runs, key=weight, default=None) if len(of_runs) > 1 else next(iter(of_runs), None)
