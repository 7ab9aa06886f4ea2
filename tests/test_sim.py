"""The protocol in the fake world, and the fake world itself. test_sim_mutants.py shows that it finds faults."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from zpccl import limits
from zpccl.errors import PeerLost, Result
from zpccl.limits import MS, SECOND
from zpccl.protocol import events
from zpccl.protocol.effects import StartReduce
from zpccl.protocol.losses import Losses
from zpccl.protocol.messages import (
    Decision,
    MasterMessage,
    Member,
    Members,
    MembersCommitted,
    Plan,
    Reducing,
    Refusal,
    Refused,
    Welcome,
)
from zpccl.protocol.peer import State
from zpccl.sim import CALM, CHAOS, CHURN, FLAKY_NETWORK, HOSTILE, JOINERS, PATHS, PROFILES, Cluster, Faults, Violation
from zpccl.sim.checkers import LINK_FAULTS, Agreement, Causes, Commits, Lineage
from zpccl.sim.clock import Clock, LocalClock
from zpccl.sim.coverage import Coverage
from zpccl.sim.dataplane import Buffer, DataPlane, Fetch
from zpccl.sim.faults import TURNS
from zpccl.sim.nemesis import RUSH_NS
from zpccl.sim.node import SimulatedPeer
from zpccl.sim.program import Script, make_spec
from zpccl.sim.runs import Setup, replay_command, run_seed, tight_limits
from zpccl.types import CollectiveKind

SEEDS_PER_TEST = 10
STILL = Faults("still")
ATTEMPT = 10**9
"""An attempt that no master starts."""
SIMPLE = Script(
    groups=1,
    tags=(2,),
    is_batched=False,
    asks_beside=False,
    optimizes=False,
    syncs_always=True,
    newcomers_receive=False,
)


def cluster_of(seed: int, peers: int) -> Cluster:
    """A cluster without faults whose peers are all members."""
    cluster = Cluster(seed, peer_count=peers, script=SIMPLE)
    while len(cluster.master.machine.registry.order) < peers:
        cluster.run(steps=1, faults=STILL)
    return cluster


# --- The protocol -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(SEEDS_PER_TEST, 200, SEEDS_PER_TEST))]
)
def test_promises_under_faults(first: int) -> None:
    """S1 to S6, then L2: every profile of faults in turn; then the network heals, and there is one outcome."""
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            run_seed(seed)
        except Exception as error:
            raise AssertionError(f"{error}; replay: {replay_command(seed)}") from error


@pytest.mark.slow
def test_swarms_are_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """All events that a swarm may cause or suffer occur in runs with its faults."""
    reached: Counter[str] = Counter()
    original = DataPlane._report_fetch
    tell = DataPlane._tell

    def report(self: DataPlane, node: SimulatedPeer, fetch: Fetch, error: str, fault: bytes | None) -> None:
        plan = fetch.plan
        reached["several sources"] += len(plan.sources) > 1
        reached["partial seeds"] += bool(plan.partial_seeds)
        reached["no source is left"] += bool(error)
        gone = [peer_id for peer_id in fetch.dropped if not self._cluster.nodes[peer_id].is_alive]
        reached["goes on without the dead"] += bool(gone and not error)
        reached["goes on without a source of wrong data"] += "digest" in str(fetch.dropped) and not error
        original(self, node, fetch, error, fault)

    def notice(self: DataPlane, node: SimulatedPeer, fetch: Fetch, event: events.FetchDone) -> None:
        reached["finds its own state changed"] += event.fault == node.peer_id
        tell(self, node, fetch, event)

    monkeypatch.setattr(DataPlane, "_report_fetch", report)
    monkeypatch.setattr(DataPlane, "_tell", notice)
    for seed in range(120):
        run_seed(seed, steps=800, faults="swarm", peers=5)
    assert [what for what, count in reached.items() if not count] == []


def test_calm_runs_have_no_failures() -> None:
    """L2, S6: without faults nothing fails, with or without joiners."""
    cluster = Cluster(3, peer_count=4, script=SIMPLE)
    cluster.run(steps=3000, faults=CALM)
    assert cluster.checkers.liveness.committed_count > 100
    assert cluster.checkers.liveness.aborted_count == 0
    assert cluster.master.machine.registry.epoch >= 4


@pytest.mark.slow
def test_dying_joiners_abort_nothing() -> None:
    """S6: joiners crash, stall, lie and vanish. Members lose nobody that has been a member for a while."""
    counts: Counter[str] = Counter()
    for seed in range(10):
        cluster = Cluster(seed, peer_count=3)
        cluster.run(steps=2000, faults=JOINERS)
        progress = cluster.checkers.liveness
        counts.update(commits=progress.committed_count, aborts=progress.aborted_count, faults=len(cluster.incidents))
    assert counts["faults"] > 100
    assert counts["aborts"] < counts["commits"] / 8  # Due to joiners that were admitted with a dying link.


def test_who_died_long_ago_may_be_removed() -> None:
    """S6: a master that all members have left keeps its list until newcomers have waited for the members."""
    run_seed(812702, faults="paths", steps=300)


def test_newcomers_after_the_healing_can_be_dialled() -> None:
    """L2, flaky, seed 16039682: after the healing a group lost the only peer that could be dialled, because of a
    connection that had broken earlier. One other peer was left, and all newcomers were behind NATs too, for a
    minute."""
    cluster = Cluster(0, peer_count=8, script=replace(SIMPLE, is_parted=True))
    cluster.run(steps=1000)
    cluster.heal()
    before = cluster.live_nodes()
    for node in before:
        if not node.is_behind_nat:
            node.leave()
            cluster.restart(node)
    assert cluster.quiesces()
    assert any(node.is_behind_nat for node in cluster.live_nodes())
    assert [node.name for node in cluster.live_nodes() if node.is_behind_nat and node not in before] == []


def test_what_is_left_of_a_strike_does_not_outlast_the_faults() -> None:
    """L2, duel, seed 18316849: a master was besieged, and the last member left it just after the healing. The other
    peer of its host had not heard of its admission, so it registered anew. It then waited for a host of which nobody
    restarted the rest, until HostIncomplete ten minutes later."""
    script = replace(SIMPLE, groups=2, tags=(1, 1), seed=1)
    assert script.host_size == 2
    for salt in range(4):  # In half of all sieges the last member leaves; in the others it is cut off.
        cluster = Cluster(0, peer_count=4, script=script, masters=2)
        cluster.run(steps=1, faults=STILL)
        while not cluster.master.machine.registry.order:
            cluster.run(steps=1, faults=STILL)
        cluster.nemesis._besiege(cluster.master, random.Random(salt))
        cluster.heal()
        healed = cluster.live_nodes()
        while cluster.clock.now_ns < cluster.healed_ns + RUSH_NS:
            cluster.run(steps=1, faults=STILL)
        assert cluster.live_nodes() == healed


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_broken_path_costs_one_attempt_and_nobody(is_cut: bool) -> None:
    """L2: for a cut and for a black hole, all go on in another order as soon as the ends of the path have noticed."""
    cluster = cluster_of(7, 5)
    registry, progress = cluster.master.machine.registry, cluster.checkers.liveness
    one, other, *_ = (peer.peer_id for peer in registry.order)
    while not cluster.links.are_linked(one, other):
        cluster.run(steps=1, faults=STILL)
    cluster.note("path cut", cluster.nodes[one], cluster.nodes[other], lasts=True)
    cluster.links.damage(one, other, is_cut=is_cut)
    epoch, damaged_ns, aborted = registry.epoch, cluster.clock.now_ns, progress.aborted_count
    while cluster.clock.now_ns < damaged_ns + 45 * limits.SECOND:
        cluster.run(steps=1, faults=STILL)
        if not progress.aborted_count - aborted:
            progress.restart()  # Only commits after the path has cost an attempt count.
    assert registry.epoch == epoch
    assert progress.aborted_count - aborted <= 2 * 5  # At most each peer's part of two collectives.
    assert progress.groups_done


def strike_outage(cluster: Cluster, notice_ns: int, duration_ns: int) -> None:
    """From now on the network of all is away, and the master notices so after a while."""
    drawn = SimpleNamespace(
        randrange=lambda _: notice_ns, choice=lambda found: found[-1], uniform=lambda *_: duration_ns / SECOND
    )
    cluster.injector._strike_outages(cast(random.Random, drawn))


def test_an_outage_breaks_links_of_all() -> None:
    """S6; churn, seed 59027484: a newcomer's link to the member of its group broke in an outage, which was not on
    record. Once it was a member, the other one died silently, and it was removed for that link."""
    cluster = Cluster(0, peer_count=3, script=SIMPLE)
    cluster.run(steps=200, faults=STILL)
    node = cluster.live_nodes()[-1]
    assert node.connection is not None
    cluster.network.break_connection(node.connection, is_silent=True)
    strike_outage(cluster, 0, SECOND)
    struck = [incident.peers for incident in cluster.incidents if incident.kind in LINK_FAULTS]
    assert sorted(struck, key=sorted) == sorted(({other.peer_id} for other in cluster.live_nodes()), key=sorted)


def test_no_path_leads_to_a_member_while_the_network_is_away() -> None:
    """L2; churn, seed 59213352: a link broke just before an outage, and the master removed a member for it before it
    noticed the outage. The checker took the path to be whole."""
    cluster = Cluster(0, peer_count=2, script=SIMPLE)
    cluster.run(steps=200, faults=STILL)
    checker, group = Causes(cluster), [node.peer_id for node in cluster.live_nodes()]
    assert len(group) == 2 and checker._are_connected(group)
    strike_outage(cluster, 0, SECOND)
    assert not checker._are_connected(group)
    cluster.network.come_back()
    assert not checker._are_connected(group), "the master may not know it yet"
    cluster.clock.now_ns += limits.LINK_SUSPECT_NS + 2 * limits.LINK_WAIT_TIMEOUT_NS
    assert checker._are_connected(group)


def members_after_an_outage(alone_s: int) -> int:
    """How many of two members are left after an outage of all. Before it, the path between them broke.

    Args:
        alone_s: how many seconds before it notices the outage the master removes one of them for that path; 0: never.
    """
    cluster = cluster_of(0, 2)
    master, order = cluster.master, cluster.master.machine.registry.order
    one, other = (peer.peer_id for peer in order)
    cluster.note("path cut", cluster.nodes[one], cluster.nodes[other], lasts=True)
    cluster.links.damage(one, other, is_cut=True)
    begun_ns, notice_ns = cluster.clock.now_ns, 5 * SECOND
    strike_outage(cluster, notice_ns, 20 * SECOND)

    def remove() -> None:
        master.machine._kick(order[1], Result.RANK_CONNECTION_FAILED, "no link", master.clock.now_ns())
        master.handle(events.Tick())

    if alone_s:
        cluster.clock.after(notice_ns - alone_s * SECOND, remove)
    while cluster.clock.now_ns < begun_ns + 2 * notice_ns:
        cluster._step()
    return len(master.machine.registry.order)


@pytest.mark.parametrize(("alone_s", "count"), [(0, 2), (1, 1), (3, 0)])
def test_who_was_alone_for_a_while_may_be_removed_in_an_outage(alone_s: int, count: int) -> None:
    """S6, churn, seed 33007296: one of two members was removed for an earlier fault, before the master noticed the
    outage. The master missed the other one next, and treated it like any single member that dies."""
    assert members_after_an_outage(alone_s) == count


@pytest.mark.parametrize(("duration_ms", "is_excused"), [(1900, True), (2400, True), (2600, False)])
@pytest.mark.parametrize("is_healed", [True, False])
def test_who_is_late_may_be_removed_as_an_outage_ends_while_the_master_misses_its_members(
    duration_ms: int, is_excused: bool, is_healed: bool
) -> None:
    """S6: some are back before the master has missed all, so it waits for the others only as long as usual."""
    cluster = Cluster(0, peer_count=3, script=SIMPLE)
    cluster.run(steps=500, faults=STILL)
    peers = frozenset((cluster.master.machine.registry.order[0].peer_id,))
    strike_outage(cluster, 2 * SECOND, 20 * SECOND if is_healed else duration_ms * MS)
    if is_healed:
        cluster.clock.after(duration_ms * MS, cluster.heal)
    while cluster.network.is_away:
        cluster._step()
    assert cluster.has_cause(peers, cluster.clock.now_ns, of_removal=True) == is_excused


@pytest.mark.parametrize("alone_s", [0, 1])
def test_catches_the_loss_of_all_in_an_outage(alone_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """S6: the checker excuses the removal only of a member that was alone for a while."""
    monkeypatch.setattr(Losses, "on_disconnected", lambda *_, **__: False)
    with pytest.raises(Violation, match=r"S6: .* is removed without a fault"):
        members_after_an_outage(alone_s)


# --- Leadership ------------------------------------------------------------------------------------------------------


def test_masters_start_as_real_ones_do() -> None:
    """They first look for peers of an earlier master, and get no numbers above all others."""
    masters = [*Cluster(1).masters, *Cluster(1, masters=3).masters]
    assert [(node.machine.is_recovering, node.machine.term) for node in masters] == [(True, 0)] * 4


def test_half_of_all_seeds_are_hard_on_leadership() -> None:
    names = Counter(Setup().resolve(seed).faults for seed in range(len(TURNS)))
    assert names.keys() == PROFILES.keys()
    assert names["split"] + names["duel"] == len(TURNS) // 2
    assert Setup(faults="duel").resolve(0).steps > Setup(faults="calm").resolve(0).steps


@pytest.mark.slow
def test_peers_die_when_others_are_calls_ahead_of_them() -> None:
    """They die while the master keeps messages of others about later calls: the order of these must not be lost."""
    for seed in range(100):
        cluster = Setup(faults="churn").build(seed)
        cluster.run(1000, PROFILES["churn"])
        if "behind_chance" in cluster.injector.struck:
            return
    pytest.fail("nobody was struck")


@pytest.mark.slow
def test_a_duel_has_all_that_may_befall_masters() -> None:
    """Each kind of fault in the profile occurs in some seed, and masters change several times in each seed."""
    kinds = {
        "ambush_chance",
        "first_chance",
        "foreign_chance",
        "list_chance",
        "far_chance",
        "revocations",
        "partitions",
    }
    crashes = []
    for seed in range(100):  # A few are enough for all kinds except list_chance, which occurs in 5 % of the seeds.
        cluster = Setup(faults="duel").build(seed)
        with suppress(Violation), tight_limits(cluster):
            cluster.run(2000, PROFILES["duel"])
        kinds -= set(cluster.injector.struck)
        crashes.append(cluster.master_crash_count)
        if not kinds and len(crashes) >= 10:
            break
    assert not kinds
    assert sum(crashes) > 3 * len(crashes)


def test_tight_limits_are_taken_back() -> None:
    before = dict(vars(limits))
    cluster = Setup(faults="duel").build(1)
    with pytest.raises(KeyError), tight_limits(cluster):
        assert max(cluster.script.tags) + 1 == limits.CALLS_IN_FLIGHT_MAX
        assert limits.calls_open_max(2) == limits.OUTCOMES_KEPT_MAX == limits.CALLS_IN_FLIGHT_MAX + 2
        raise KeyError
    assert dict(vars(limits)) == before


class FakeMaster:
    """A master that proposes and commits lists as told."""

    def __init__(self, checker: Lineage, index: int) -> None:
        self.checker = checker
        self.lifetime = (index, 0, 0)
        self.name = f"master{index}"
        self.clock = LocalClock(checker.cluster.clock)
        self.started_ns = 0

    def key(self, connection: str, number: int) -> tuple[bytes, int]:
        return b"run", number

    def propose(self, epoch: int, members: str, *reported: int) -> None:
        """Lists of these epochs were reported to the master before."""
        for number in reported:
            self.checker._reported.setdefault(self.lifetime, {})[(b"run", number), b""] = None
        listed = tuple(Member(letter.encode() * 16, 0, letter) for letter in members)
        self.checker.on_master_message(cast(Any, self), "", Members(epoch, listed))

    def commit(self, epoch: int) -> None:
        self.checker.on_master_message(cast(Any, self), "", MembersCommitted(epoch))


@pytest.fixture
def duellists() -> tuple[FakeMaster, FakeMaster]:
    checker = Lineage(Cluster(1, masters=2))
    one, other = FakeMaster(checker, 0), FakeMaster(checker, 1)
    one.propose(1, "pqr")
    one.commit(1)
    return one, other


def test_lists_may_go_from_one_master_to_the_other(duellists: tuple[FakeMaster, FakeMaster]) -> None:
    one, other = duellists
    one.propose(2, "pqrs")
    other.propose(9, "pqrs", 1, 2)
    one.commit(2)  # By a late acknowledgement.
    other.commit(9)
    other.propose(10, "qrs")
    other.commit(10)


def successor(checker: Lineage) -> FakeMaster:
    """A new master of a run with one address, whose members all have the list 2, and planned something under it."""
    former = FakeMaster(checker, 0)
    former.propose(1, "pq")
    former.propose(2, "pqr")
    checker._planned.add((b"run", 0))
    checker._accepted[b"run", 2] = {letter * 16 for letter in (b"p", b"q", b"r")}
    return FakeMaster(checker, 1)


def test_strangers_may_be_members_of_a_list_that_is_lost() -> None:
    """L3; anarchy, seed 58033270: the checker looked for the process of a stranger, which has none."""
    checker = Lineage(Cluster(1))
    master = successor(checker)
    master.propose(9, "pq", 1)
    assert checker._lists[b"run", 9].parents == [(b"run", 1)]


@pytest.mark.parametrize(("drift_ppm", "is_late"), [(0, False), (5000, True)])
def test_masters_wait_by_their_own_clocks(drift_ppm: int, is_late: bool) -> None:
    """L3; minority, seed 59174146: the clock of a master was fast, and the checker measured with the simulator's."""
    cluster = Cluster(1)
    checker = Lineage(cluster)
    master = successor(checker)
    machine = SimpleNamespace(run_id=b"run", state=State.MEMBER)
    node = cast(SimulatedPeer, SimpleNamespace(is_alive=True, machine=machine))
    cluster.nodes.update(dict.fromkeys((b"q" * 16, b"r" * 16), node))
    master.clock = LocalClock(cluster.clock, 0, drift_ppm)
    cluster.clock.now_ns = limits.MINORITY_WAIT_NS * 997 // 1000
    with nullcontext() if is_late else pytest.raises(Violation, match="L3"):
        master.propose(9, "pq", 1)


@pytest.mark.parametrize("epoch", [5, 99])
def test_catches_a_list_that_descends_from_an_older_one(duellists: tuple[FakeMaster, FakeMaster], epoch: int) -> None:
    """S3: whatever number it has."""
    one, other = duellists
    one.propose(6, "qr")
    other.propose(epoch, "pqr", 1)
    one.commit(6)
    with pytest.raises(Violation, match="S3"):
        other.commit(epoch)


@pytest.mark.parametrize("run_id", [b"run", b"another"])
def test_only_its_own_run_refuses_a_member_for_good(duellists: tuple[FakeMaster, FakeMaster], run_id: bytes) -> None:
    """L3; duel, seed 16030793: a master that led another run refused s. Later the run of s yielded to that run, which
    admitted s like any newcomer, and s left. The Hello with which s had registered named the run that it came from.
    """
    one, other = duellists
    left = SimpleNamespace(run_id=run_id, epoch=1, state=State.CLOSED)
    node = cast(Any, SimpleNamespace(peer_id=b"s" * 16, machine=left, list=("one", "other")))
    cluster = one.checker.cluster
    cluster.nodes[node.peer_id] = node
    cluster.node_of = lambda connection: node  # type: ignore[method-assign]
    refused = Refused(Refusal.UNKNOWN_SESSION, "", b"run", epoch=2)
    one.checker.on_master_message(cast(Any, one), "", refused)
    other.propose(9, "pqrs", 1)
    with pytest.raises(Violation, match="L3") if run_id == b"run" else nullcontext():
        other.commit(9)


@pytest.mark.parametrize("is_struck", [True, False])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("run_id", [None, b"", b"run", b"another"])
def test_only_who_has_given_its_run_up_is_removed_though_connected(
    run_id: bytes | None, is_before: bool, is_struck: bool
) -> None:
    """S6; minority, seed 18015992: the run of a member had decided nothing. The master of a run of newcomers refused
    it. It answered its calls as if it were alone, and waited to be admitted there. That master died. The next one took
    the first run over from its other members, with this one in the list, and removed it when it said so: long after the
    last fault (seeds 18756280, 18965656). In this test it yields before or after the take-over, and no run, its own run
    or another one registers it.
    """
    cluster = Cluster(3, peer_count=3, script=SIMPLE)
    cluster.run(steps=500, faults=STILL)
    (checker,) = (checker for checker in cluster.checkers.all if isinstance(checker, Causes))
    master, node = cluster.master, cluster.live_nodes()[-1]
    own_id, promise = master.machine.run_id, master.machine._leader.promise
    heard: list[Any] = [] if run_id is None else [Refused(Refusal.YIELDED, "")]
    heard += [Welcome(own_id if run_id == b"run" else b"another", *promise)] if run_id else []

    def hear() -> None:
        for message in heard:
            node.machine.handle(events.MasterMessageReceived(message), node.now_ns())

    def take_over() -> None:
        master.machine.generation += 1
        checker.on_master_step(master)

    for step in (hear, take_over) if is_before else (take_over, hear):
        step()
    assert (node.machine.run_id != own_id, node.machine.is_unregistered) == (run_id == b"another", run_id == b"")
    if is_struck:
        cluster.note("connection", node)
    master.machine.registry.remove(master.machine.registry.peers[node.peer_id])
    is_right = is_before and run_id in (b"", b"another")
    what = "though it reconnected" if is_struck else "without a fault"
    with nullcontext() if is_right else pytest.raises(Violation, match=f"S6: .* {what}"):
        checker.on_master_step(master)


@pytest.mark.parametrize("dead", ["a mate", "a mate of an earlier list", "one that is no mate", "a former mate", ""])
def test_only_who_has_lost_a_mate_may_end_attempts_long_after_a_fault(dead: str) -> None:
    """S6; minority, seed 41014349: a member died while there was no master. The next master waited for others of the
    list, too, and then adopted the run from few reports. So it removed that member 44 s later. The call of the other
    member of its host had just been planned, and was aborted as the master removed the rest of the host.
    """
    cluster = Cluster(3, peer_count=4, script=replace(SIMPLE, groups=2, tags=(1, 1), seed=1))
    cluster.run(steps=800, faults=STILL)
    (checker,) = (checker for checker in cluster.checkers.all if isinstance(checker, Causes))
    master, (node, mate, other, _) = cluster.master, cluster.live_nodes()
    assert (node.host, mate.group, other.group) == (mate.host, 1, 0)
    assert len(master.machine.registry.order) == 4
    lost = other if dead == "one that is no mate" else mate
    lost.is_alive = not dead
    if dead == "a former mate":  # Of a process that ran on this host earlier, and was no member with it.
        del checker._members[mate.peer_id]
    elif dead == "a mate of an earlier list":
        master.machine.registry.remove(master.machine.registry.peers[mate.peer_id])
        checker.on_master_step(master)

    def say(message: MasterMessage) -> None:
        assert node.connection is not None
        checker.on_master_message(master, node.connection.name, message)

    say(Plan(ATTEMPT, (1,), Reducing((node.peer_id,), 1)))
    aborted = Decision(1, Result.RANK_CONNECTION_LOST, 0, "lost", attempt_id=ATTEMPT)
    is_right = dead in ("a mate", "a mate of an earlier list")
    with nullcontext() if is_right else pytest.raises(Violation, match=r"S6: .* aborts without a fault"):
        say(aborted)


@pytest.mark.parametrize("has_returned", [False, True])
def test_catches_a_commit_that_another_has_lost(has_returned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: one of two members has a result, and the other an error. split, seed 23003643: a newcomer did not know that
    its list was committed. It was cut off in a sync that was committed for the others, gave its call up, was lost, and
    has registered again: it is no survivor of that sync."""
    on_answer, commits = Commits.on_answer, itertools.count()
    losers: list[SimulatedPeer] = []

    def lose_one(checker: Commits, node: SimulatedPeer, call: Any, outcome: Any) -> None:
        is_lost = call.call_id in node.committed and next(commits) == 20
        losers.extend([node] * is_lost)
        on_answer(checker, node, call, PeerLost("planted") if is_lost else outcome)

    monkeypatch.setattr(Commits, "on_answer", lose_one)
    cluster = Cluster(3, peer_count=3, script=SIMPLE)
    cluster.run(steps=1500, faults=STILL)
    (checker,) = (checker for checker in cluster.checkers.all if isinstance(checker, Commits))
    (loser,) = losers
    loser.machine.state = State.RETURNING if has_returned else State.MEMBER
    checker.on_peer_step(loser)
    loser.machine.state = State.MEMBER
    with nullcontext() if has_returned else pytest.raises(Violation, match=r"S1: .* an error"):
        checker.on_end()


@pytest.mark.parametrize(("terms", "run_id"), [(-1, b""), (0, b""), (1, b""), (-1, b"another")])
def test_only_a_leader_that_was_replaced_may_plan_what_peers_have_committed(terms: int, run_id: bytes) -> None:
    """S1; duel, seed 19655297: a master stood still, the members went to the next one, and peers committed calls there.
    The first master went on, read the votes for these calls, and planned them on a connection whose end it had not
    noticed."""
    cluster = Cluster(3, peer_count=3, script=SIMPLE)
    (checker,) = (checker for checker in cluster.checkers.all if isinstance(checker, Agreement))
    cluster.run(steps=300, faults=STILL)
    cluster.crash_master(cluster.master, SECOND)  # The next master leads in a term above 0.
    while not any(attempt_id >> limits.EPOCH_BITS for _, attempt_id in checker._between_peers):
        cluster.run(steps=1, faults=STILL)
    attempt, connection = max(checker._between_peers), cluster.live_nodes()[0].connection
    assert connection is not None
    calls = cluster.dataplane.attempts[attempt].calls
    if run_id:
        cluster.master._run_of[connection.name] = run_id
    term = (attempt[1] >> limits.EPOCH_BITS) + terms
    plan = Plan((term << limits.EPOCH_BITS) + ATTEMPT, tuple(calls.values()), Reducing(tuple(calls), 1))
    is_right = terms < 0 and not run_id
    with nullcontext() if is_right else pytest.raises(Violation, match=r"S1: .* have committed is planned"):
        checker.on_master_message(cluster.master, connection.name, plan)


def test_messages_belong_to_the_run_of_the_welcome() -> None:
    """S3: a master begins a run with a peer that has left it, and is by now a member elsewhere (seed 16033457)."""
    cluster = Cluster(3, peer_count=2, masters=2, script=SIMPLE)
    cluster.run(steps=500, faults=STILL)
    leader, other = cluster.masters
    node = next(iter(cluster.live_nodes()))
    assert node.connection is not None
    assert leader.key(node.connection.name, 5) == (node.machine.run_id, 5)
    late = cluster.network.open(node, "one that it has left", other)
    assert other.key(late.name, 5) == (other.machine.run_id, 5)
    assert other.machine.run_id != node.machine.run_id


# --- The fake world ---------------------------------------------------------------------------------------------------


def lines_of(seed: int, **options: Any) -> list[str]:
    lines: list[str] = []
    run_seed(seed, tracer=lines.append, **options)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("faults", PROFILES)
def test_a_seed_replays(faults: str) -> None:
    """The same seed gives the same trace; another seed gives another one."""
    first = lines_of(11, faults=faults, steps=500)
    assert len(first) > 500
    assert first == lines_of(11, faults=faults, steps=500)
    assert first != lines_of(12, faults=faults, steps=500)


def test_a_seed_replays_in_another_process() -> None:
    """Nothing depends on the order of sets, which Python's hashes of bytes and texts determine."""
    command = [sys.executable, "-m", "zpccl.sim", "--seed", "13", "--steps", "600", "--faults", "chaos", "--trace"]
    outputs = []
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        outputs.append(done.stdout.splitlines()[:-1])  # The last line has the duration.
    assert len(outputs[0]) > 600
    assert outputs[0] == outputs[1]


def test_clock_runs_timers_in_order() -> None:
    clock = Clock()
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[], None]:
        return lambda: seen.append((name, clock.now_ns))

    clock.after(20, note("c"))
    clock.after(10, note("a"))
    clock.after(10, note("b"))
    cancelled = clock.after(5, note("never"))
    cancelled.cancel()
    clock.at(-5, note("at once"))
    while clock.step():
        pass
    assert seen == [("at once", 0), ("a", 10), ("b", 10), ("c", 20)]
    assert clock.next_ns() is None


def test_clocks_of_processes_differ_and_agree_with_their_timers() -> None:
    """A timer for a moment of a process's clock fires in the first nanosecond at which that clock shows it."""
    rng = random.Random(5)
    world = Clock()
    drifts = []
    for _ in range(300):
        local = LocalClock.draw(world, rng)
        drifts.append(local.drift_ppm)
        begin_ns = local.now_ns()
        due_ns = begin_ns + rng.randrange(1, 10**10)
        at_ns = local.world_ns(due_ns)
        assert at_ns is not None
        assert at_ns > world.now_ns
        world.now_ns = at_ns - 1
        assert local.now_ns() < due_ns
        world.now_ns = at_ns
        assert local.now_ns() >= due_ns
        assert local.world_ns(None) is None
    assert min(drifts) < -9000 < 9000 < max(drifts)


@pytest.mark.slow
@pytest.mark.parametrize(("to_master", "to_peer"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("seconds", [2, 20])
def test_a_stalled_path_holds_what_it_carries(to_master: bool, to_peer: bool, seconds: int) -> None:
    """The bytes come late and in order, or are lost if the path stalls until an end has waited too long."""
    cluster = cluster_of(3, 1)
    (node,) = cluster.live_nodes()
    connection = node.connection
    assert connection is not None
    network, began_ns = cluster.network, cluster.clock.now_ns
    cluster.note("stalled", node, is_silent=True, duration_ns=seconds * SECOND)
    network.stall(node, seconds * SECOND, to_master=to_master, to_peer=to_peer)
    came: dict[str, list[int]] = {"to_master": [], "to_peer": []}
    for name, times in came.items():
        for _ in range(3):
            getattr(connection, name).send(MS, lambda times=times: times.append(cluster.clock.now_ns))
    connected: list[int] = []
    while cluster.clock.now_ns < began_ns + 25 * SECOND:
        cluster.run(steps=1)
        if node.connection is not None and node.connection is not connection and not connected:
            connected.append(cluster.clock.now_ns)
    is_lost = seconds * SECOND > limits.HEARTBEAT_TIMEOUT_NS
    for name, is_held in (("to_master", to_master), ("to_peer", to_peer)):
        if not is_held:
            assert all(time_ns < began_ns + SECOND for time_ns in came[name])
        elif is_lost:
            assert came[name] == []
        else:
            assert [time_ns >= began_ns + seconds * SECOND for time_ns in came[name]] == [True] * 3
    assert connection.is_broken == is_lost
    assert all(time_ns >= began_ns + seconds * SECOND for time_ns in connected)  # None over a path that stalls.
    assert bool(connected) == is_lost


@pytest.mark.slow
def test_connections_fail_in_all_ways_that_shells_tell_of() -> None:
    """Refused, broken, ended or silent in the handshake; by a master of another version, or one that revoked a key."""
    coverage = Coverage()
    for seed, faults in enumerate((JOINERS, FLAKY_NETWORK, PROFILES["split"], PROFILES["duel"])):
        Cluster(seed, peer_count=5, masters=faults.masters, coverage=coverage).run(1500, faults)
    reached = {(event, phase) for event, phase in coverage.counts["session"]}
    assert reached >= {
        ("DialFailed", "dialling"),
        ("HandshakeFailed", "handshake"),
        ("Tick", "handshake"),
        ("MechanismTold", "asking"),
        ("DataReceived", "up"),
        ("SocketBroke", "up"),
        ("UseMaster", "up"),
        ("UseMaster", "paused"),
        ("Tick", "paused"),
    }


def test_a_connection_keeps_order_and_loses_only_its_tail() -> None:
    rng = random.Random(5)
    lost = 0
    for seed in range(50):
        cluster = Cluster(seed, peer_count=1)
        seen: list[int] = []
        connection = cluster.network.open(None, "x", cluster.masters[0])
        for number in range(10):
            connection.to_master.send(rng.randrange(100), lambda number=number, seen=seen: seen.append(number))  # type: ignore[misc]
        while len(seen) < 3:
            cluster.clock.step()
        cluster.network.break_connection(connection, is_silent=False)
        while cluster.clock.step():
            pass
        assert seen == list(range(len(seen)))
        lost += len(seen) < 10
        assert "x" not in cluster.network.connections
    assert 25 < lost < 50


def test_an_attempt_needs_all_its_peers_and_its_ring() -> None:
    """No peer gets a sum before all have started, and a peer that is cut off gets none."""
    cluster = cluster_of(1, 3)
    nodes = cluster.live_nodes()
    order = tuple(node.peer_id for node in nodes)
    buffers = [Buffer(1), Buffer(10), Buffer(100)]
    spec = make_spec(0, 8, CollectiveKind.ALL_REDUCE, is_root=False)
    plane = cluster.dataplane
    start = StartReduce(999, ATTEMPT, Reducing(order, 4096))
    for node, buffer in zip(nodes[:2], buffers, strict=False):
        plane.start_reduce(node, start, spec, buffer)
    assert all(part.finish is None for part in plane.attempts[nodes[0].key(ATTEMPT)].parts.values())
    plane.start_reduce(nodes[2], start, spec, buffers[2])
    assert all(part.finish is not None for part in plane.attempts[nodes[0].key(ATTEMPT)].parts.values())
    plane.lose_peer(nodes[2])
    plane.end_reduce(nodes[0], ATTEMPT, False)
    assert buffers[0].value == 1
    with pytest.raises(Violation, match="S1"):
        plane.end_reduce(nodes[1], ATTEMPT, True)
    with pytest.raises(Violation, match="S4"):
        plane.start_reduce(nodes[0], start, spec, buffers[0])


@pytest.mark.slow
def test_profiles_do_what_they_say() -> None:
    """Every kind of fault occurs."""
    kinds: Counter[str] = Counter()
    for seed, faults in enumerate((CHURN, PATHS, FLAKY_NETWORK, HOSTILE, CHAOS, CHAOS, PROFILES["muddled"])):
        cluster = Cluster(seed, peer_count=5)
        cluster.run(steps=2500, faults=faults)
        kinds.update(incident.kind for incident in cluster.incidents)
    expected = "crashed|left|connection broken|link broken|withdrawn|wrong result|muddled|stalled".split("|")
    assert kinds.keys() >= {*expected, "path cut", "path is a black hole", "hung"}


@pytest.mark.slow
def test_random_programs_meet_all_that_may_come_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of their calls succeed. The peer or the master refuses others, for each of the possible reasons."""
    outcomes: Counter[tuple[str, str]] = Counter()
    original = SimulatedPeer._answer

    def answer(self: SimulatedPeer, call_id: int, outcome: Any) -> None:
        request = type(self.calls[call_id].request).__name__
        outcomes[request, "" if isinstance(outcome, int) else type(outcome).__name__] += 1
        text = str(outcome)
        outcomes["refusal", "crosswise"] += "wait for each other in different calls" in text
        outcomes["refusal", "SEND_ONLY"] += "SEND_ONLY peers hold different contents" in text
        original(self, call_id, outcome)

    monkeypatch.setattr(SimulatedPeer, "_answer", answer)
    for seed in range(45):
        run_seed(seed, faults="unruly", steps=1000)
    for request in ("Collective", "Sync", "Topology"):
        assert outcomes[request, ""] > 20
        assert outcomes[request, "InvalidUsage"] > 20
    expected = {("Collective", name) for name in ("CollectiveMismatch", "OperationTimeout", "TooFewPeers", "PeerLost")}
    expected |= {("Sync", name) for name in ("NoSharedState", "InvalidArgument", "PendingAsyncOps")}
    expected |= {("Connect", "InvalidUsage"), ("refusal", "crosswise"), ("refusal", "SEND_ONLY")}
    assert {key for key in expected if not outcomes[key]} == set()


def test_scripts_differ_between_seeds() -> None:
    scripts = {Script.draw(random.Random(seed)) for seed in range(100)}
    assert {script.groups for script in scripts} == {1, 2, 3}
    for name in ("is_batched", "asks_beside", "optimizes", "syncs_always", "newcomers_receive", "drifts", "is_quick"):
        assert {getattr(script, name) for script in scripts} == {False, True}
