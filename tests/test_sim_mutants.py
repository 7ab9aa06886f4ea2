"""The simulator finds faults in the machines and in the fake world, and names the broken promise."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from mutants import MUTANTS
from mutation import Mutant, parse_mutants
from planting import JOINERS_NEVER_ADMITTED, fault, plant

from zpccl.sim import Violation
from zpccl.sim.runs import run_seed

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
OWN = parse_mutants(
    r"""
new-connection-taken-for-old: protocol.master:MasterMachine._on_hello (simulator)
  L2 or S6 in 40 flaky runs of 600 steps
  - hello.connection < known.connection_count
  + hello.connection <= known.connection_count + 1
two-member-lists-of-one-epoch: protocol.membership:Registry.member_list (simulator)
  S3 in 40 flaky runs of 600 steps
  - self.order
  + self.order[:: -1 if self.round % 2 else 1]
attempt-ids-repeat: protocol.master:MasterMachine._next_attempt_id (simulator)
  S6 in 40 calm runs of 600 steps
  - (self.term << limits.EPOCH_BITS) + self._attempt_count
  + (self.term << limits.EPOCH_BITS) + self._attempt_count // 2
answer-while-the-data-plane-runs: protocol.peer:PeerMachine._end (simulator)
  S2 or S4 in 40 churn runs of 600 steps
  - self._effects.append(EndReduce(attempt_id, commit))
  + self._effects += [EndReduce(attempt_id, commit)] * commit
sync-left-running: protocol.peer:PeerMachine._end (simulator)
  S4 in 120 flaky runs of 600 steps
  - self._effects.append(EndSync(call.call_id, attempt_id, commit))
  + self._effects += [EndSync(call.call_id, attempt_id, commit)] * commit
peer-that-came-back-removed: protocol.master:MasterMachine._on_hello (simulator)
  S6 in 40 flaky runs of 600 steps
  - known.disconnected_ns = None
  + pass
stragglers-that-are-held-up-themselves: protocol.stragglers:Wait.stragglers (simulator)
  S6 in 100 paths runs of 3000 steps
  - [peer for peer in self.missing if not _calls_that_hold_up(peer)]
  + self.missing
second-answer: protocol.peer:PeerMachine._on_decision (simulator)
  L1 in 40 calm runs of 600 steps
  - self._effects.append(Resolve(call.call_id, decision.value))
  + self._effects += [Resolve(call.call_id, decision.value)] * 2
master-spins: protocol.master:MasterMachine.deadline_ns (simulator)
  L1 in 40 churn runs of 600 steps
  - min((deadline for deadline in deadlines if deadline is not None), default=None)
  + min((0 for deadline in deadlines if deadline is not None), default=None)
answers-kept-for-ever: protocol.operation:Operations._forget_answers (simulator)
  B1 in 40 calm runs of 3000 steps
  - del peer.answers[call_id]
  + pass
far-peers-have-no-more-time: protocol.losses:reconnect_grace_ns (simulator)
  L2 in 20 regicide runs of 3000 steps
  - max(least_ns, min(needed_ns, limits.RECONNECT_GRACE_MAX_NS))
  + least_ns
deadlocks-never-end: protocol.stragglers:Stragglers._end_deadlocks (simulator)
  L2 in 10 paths runs of 1000 steps
  - timeout_ns is not None and self._registry.have_all_reported
  + False
timeout-closes-in-an-outage: protocol.peer:PeerMachine._release (simulator)
  L2 in 20 impatient runs of 1000 steps
  - assert call.withdrawn is not None
  + return self._close(call.withdrawn)
other-version-ends-a-member: protocol.peer:PeerMachine._on_foreign (simulator)
  L3 in 10 standby runs of 3000 steps
  - goes_on = "switching to the next master" if self._masters.has_others else "waiting for a master there"
  + return self._close(VersionMismatch(text))
buffer-not-restored: sim.dataplane:DataPlane.end_reduce (simulator)
  S2 in 40 churn runs of 600 steps
  - part.buffer.value = part.saved
  + pass
result-of-other-inputs: sim.dataplane:DataPlane.start_reduce (simulator)
  S2 in 40 calm runs of 600 steps
  - attempt.inputs[node.peer_id] = buffer.value
  + attempt.inputs[node.peer_id] = 7
sync-that-writes-nothing: sim.dataplane:DataPlane._copy (simulator)
  S5 in 40 calm runs of 600 steps
  - fetch.values[key] = value
  + fetch.values[key] = node.shared_state.values[key]
"""
)
"""Faults of these tests alone, in the form of mutants.py."""
CASES = {mutant: mutant.breaks for mutant in OWN} | {
    BY_NAME["digests-not-compared"]: "S1 or S2 in 40 hostile runs of 600 steps",
    BY_NAME["commit-on-a-majority"]: "S1 in 400 churn runs of 600 steps",
    BY_NAME["epoch-not-raised-at-a-loss"]: "S3 in 40 churn runs of 600 steps",
    BY_NAME["holder-that-dies-ends-a-sync"]: "L2 in 120 swarm runs of 600 steps",
    BY_NAME["connects-no-more"]: "L2 in 40 flaky runs of 600 steps",
    BY_NAME["decision-is-not-said-again"]: "L2 in 40 flaky runs of 600 steps",
    BY_NAME["begins-a-run-beside-another"]: "S3 in 20 duel runs of 3000 steps",
    BY_NAME["held-newcomers-count"]: "L2 in 20 duel runs of 3000 steps",
    BY_NAME["half-is-a-quorum"]: "S3 in 20 duel runs of 3000 steps",
    BY_NAME["minority-goes-on-at-once"]: "L3 in 40 minority runs of 3000 steps",
    BY_NAME["cut-off-master-removes-all"]: "S6 in 40 churn runs of 1000 steps",
    BY_NAME["plan-ahead-kept-over-members"]: "S1 in 20 duel runs of 3000 steps",
    JOINERS_NEVER_ADMITTED: "L2 in 40 calm runs of 600 steps",
    fault(
        "two-plans-of-one-attempt",
        "protocol.kinds.collective:Collectives._send_plan",
        "self._outbox.broadcast(peers, Plan(attempt.attempt_id, calls, attempt.how, ahead))",
        "for peer in peers:\n"
        "    order = attempt.how.order\n"
        "    how = Reducing(order[::-1] if order[0] == peer.peer_id else order, attempt.how.frame_bytes)\n"
        "    self._outbox.broadcast([peer], Plan(attempt.attempt_id, calls, how))",
    ): "S3 in 40 calm runs of 600 steps",
    fault(
        "plan-names-who-has-nothing",
        "protocol.election:elect",
        "election.holders = [peer for peer in voters"
        " if _contents(standing[peer]) == _contents(elected) and fetched <= _holdings(standing[peer])]",
        "election.holders = list(standing)[-1:]\nelection.fetch[election.holders[0]] = ()",
    ): "S5 in 40 calm runs of 600 steps",
    fault(
        "joiner-takes-collectives-down",
        "protocol.master:MasterMachine._remove",
        "self.registry.remove(peer, is_sent_on=reason == _SENT_ON)",
        "for attempt in self.operations.running_of('collective') if not peer.is_member else ():\n"
        "    self.operations._withdraw(*next(iter(attempt.calls.items())))\n"
        "self.registry.remove(peer)",
    ): "S1 or S6 in 40 joiners runs of 3000 steps",
}
"""One of these promises is reported as broken, by one of at most so many runs with this profile of faults."""


def promises_broken(seeds: int, faults: str, steps: int) -> Iterator[str]:
    """The checkers' reports on seeds, as ids of promises; "" if a machine's own invariants caught it."""
    for seed in range(seeds):
        try:
            run_seed(seed, faults=faults, steps=steps)
        except Violation as violation:
            yield violation.promise
        except AssertionError:
            yield ""


def test_the_unbroken_is_not_accused() -> None:
    for seed in range(10):
        run_seed(seed, faults="hostile", steps=600)


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "found"), CASES.items(), ids=[mutant.name for mutant in CASES])
def test_catches(mutant: Mutant, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match = re.fullmatch(r"(.+) in (\d+) (\w+) runs of (\d+) steps", found)
    assert match is not None
    promises, seeds, faults, steps = match.groups()
    plant(monkeypatch, mutant)
    assert any(promise in promises.split(" or ") for promise in promises_broken(int(seeds), faults, int(steps)))
