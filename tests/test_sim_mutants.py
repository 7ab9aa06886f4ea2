"""The simulator finds faults in the machines and in the fake world, and names the broken promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from mutants import MUTANTS
from mutation import Mutant
from planting import JOINERS_NEVER_ADMITTED, fault, plant

from zpccl.sim import Violation
from zpccl.sim.runs import run_seed

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


@dataclass(frozen=True)
class Case:
    """A fault, and the runs that show it.

    Attributes:
        mutant: the fault.
        faults: the profile of the runs.
        promises: one of these is reported as broken.
        seeds: maximum number of runs.
        steps: length of a run.
    """

    mutant: Mutant
    faults: str
    promises: str
    seeds: int = 40
    steps: int = 600


def planted(
    name: str, function: str, old: str, new: str, faults: str, promises: str, seeds: int = 40, steps: int = 600
) -> Case:
    """A case with its own fault."""
    return Case(fault(name, function, old, new), faults, promises, seeds, steps)


CASES = (
    Case(BY_NAME["digests-not-compared"], "hostile", "S1 S2"),
    Case(BY_NAME["commit-on-a-majority"], "churn", "S1", seeds=400),
    Case(BY_NAME["epoch-not-raised-at-a-loss"], "churn", "S3"),
    Case(BY_NAME["holder-that-dies-ends-a-sync"], "swarm", "L2", seeds=120),
    Case(BY_NAME["connects-no-more"], "flaky", "L2"),
    planted(
        "new-connection-taken-for-old",
        "protocol.master:MasterMachine._on_hello",
        "hello.connection < known.connection_count",
        "hello.connection <= known.connection_count + 1",
        "flaky",
        "L2 S6",
    ),
    planted(
        "two-member-lists-of-one-epoch",
        "protocol.membership:Registry.member_list",
        "self.order",
        "self.order[:: -1 if self.round % 2 else 1]",
        "flaky",
        "S3",
    ),
    planted(
        "two-plans-of-one-attempt",
        "protocol.kinds.collective:Collectives._send_plan",
        "self._outbox.broadcast(peers, Plan(attempt.attempt_id, calls, attempt.how, ahead))",
        "for peer in peers:\n"
        "    order = attempt.how.order\n"
        "    how = Reducing(order[::-1] if order[0] == peer.peer_id else order, attempt.how.frame_bytes)\n"
        "    self._outbox.broadcast([peer], Plan(attempt.attempt_id, calls, how))",
        "calm",
        "S3",
    ),
    planted(
        "attempt-ids-repeat",
        "protocol.master:MasterMachine._next_attempt_id",
        "(self.term << limits.EPOCH_BITS) + self._attempt_count",
        "(self.term << limits.EPOCH_BITS) + self._attempt_count // 2",
        "calm",
        "S6",
    ),
    planted(
        "answer-while-the-data-plane-runs",
        "protocol.peer:PeerMachine._end",
        "self._effects.append(EndReduce(attempt_id, commit))",
        "self._effects += [EndReduce(attempt_id, commit)] * commit",
        "churn",
        "S2 S4",
    ),
    planted(
        "sync-left-running",
        "protocol.peer:PeerMachine._end",
        "self._effects.append(EndSync(call.call_id, attempt_id, commit))",
        "self._effects += [EndSync(call.call_id, attempt_id, commit)] * commit",
        "flaky",
        "S4",
        seeds=120,
    ),
    planted(
        "plan-names-who-has-nothing",
        "protocol.election:elect",
        "election.holders = [peer for peer in voters"
        " if _contents(standing[peer]) == _contents(elected) and fetched <= _holdings(standing[peer])]",
        "election.holders = list(standing)[-1:]\nelection.fetch[election.holders[0]] = ()",
        "calm",
        "S5",
    ),
    planted(
        "joiner-takes-collectives-down",
        "protocol.master:MasterMachine._remove",
        "self.registry.remove(peer, is_sent_on=reason == _SENT_ON)",
        "for attempt in self.operations.running_of('collective') if not peer.is_member else ():\n"
        "    self.operations._withdraw(*next(iter(attempt.calls.items())))\n"
        "self.registry.remove(peer)",
        "joiners",
        "S1 S6",
        steps=3000,
    ),
    planted(
        "peer-that-came-back-removed",
        "protocol.master:MasterMachine._on_hello",
        "known.disconnected_ns = None",
        "pass",
        "flaky",
        "S6",
    ),
    planted(
        "stragglers-that-are-held-up-themselves",
        "protocol.stragglers:Wait.stragglers",
        "[peer for peer in self.missing if not _calls_that_hold_up(peer)]",
        "self.missing",
        "paths",
        "S6",
        seeds=100,
        steps=3000,
    ),
    planted(
        "second-answer",
        "protocol.peer:PeerMachine._on_decision",
        "self._effects.append(Resolve(call.call_id, decision.value))",
        "self._effects += [Resolve(call.call_id, decision.value)] * 2",
        "calm",
        "L1",
    ),
    Case(
        BY_NAME["decision-is-not-said-again"],
        "flaky",
        "L2",
    ),
    Case(JOINERS_NEVER_ADMITTED, "calm", "L2"),
    planted(
        "master-spins",
        "protocol.master:MasterMachine.deadline_ns",
        "min((deadline for deadline in deadlines if deadline is not None), default=None)",
        "min((0 for deadline in deadlines if deadline is not None), default=None)",
        "churn",
        "L1",
    ),
    planted(
        "answers-kept-for-ever",
        "protocol.operation:Operations._forget_answers",
        "del peer.answers[call_id]",
        "pass",
        "calm",
        "B1",
        steps=3000,
    ),
    planted(
        "buffer-not-restored",
        "sim.dataplane:DataPlane.end_reduce",
        "part.buffer.value = part.saved",
        "pass",
        "churn",
        "S2",
    ),
    planted(  # All peers agree on a wrong result.
        "result-of-other-inputs",
        "sim.dataplane:DataPlane.start_reduce",
        "attempt.inputs[node.peer_id] = buffer.value",
        "attempt.inputs[node.peer_id] = 7",
        "calm",
        "S2",
    ),
    planted(
        "sync-that-writes-nothing",
        "sim.dataplane:DataPlane._copy",
        "fetch.values[key] = value",
        "fetch.values[key] = node.shared_state.values[key]",
        "calm",
        "S5",
    ),
)


def promises_broken(case: Case) -> Iterator[str]:
    """The checkers' reports on seeds, as ids of promises; "" if a machine's own invariants caught it."""
    for seed in range(case.seeds):
        try:
            run_seed(seed, faults=case.faults, steps=case.steps)
        except Violation as violation:
            yield violation.promise
        except AssertionError:
            yield ""


def test_the_unbroken_is_not_accused() -> None:
    for seed in range(10):
        run_seed(seed, faults="hostile", steps=600)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.mutant.name)
def test_catches(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, case.mutant)
    assert any(promise in case.promises.split() for promise in promises_broken(case))
