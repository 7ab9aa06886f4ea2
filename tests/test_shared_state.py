"""Shared state over the whole stack: who receives what, who is refused, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from e2e.harness import until
from e2e.local import Run, failure, finish, local_run

import zpccl
from zpccl import limits
from zpccl.errors import Result
from zpccl.types import SharedStateSyncStrategy as Strategy

pytestmark = pytest.mark.e2e


@pytest.fixture
def trio() -> Iterator[Run]:
    with local_run(3) as run:
        yield run


def state_of(revision: int = 0, **values: Any) -> zpccl.SharedState:
    infos = [zpccl.TensorInfo.from_numpy(np.array(value, np.float32, ndmin=1), name) for name, value in values.items()]
    state = zpccl.SharedState(infos)
    state.revision = revision
    return state


def held(state: zpccl.SharedState) -> list[float]:
    return [float(info.tensor.ravel()[0]) for info in state.tensor_infos]


def sync(run: Run, states: list[zpccl.SharedState], strategies: list[Strategy] | None = None) -> list[Any]:
    """Syncs everybody; the info or the error of each."""
    strategies = strategies or [Strategy.ENFORCE_POPULAR] * len(states)
    begun = [
        run.start(comm.sync_shared_state, state, strategy)
        for comm, state, strategy in zip(run.comms, states, strategies, strict=True)
    ]
    return [failure(future) or finish(future) for future in begun]


def test_the_most_popular_contents_win(trio: Run) -> None:
    """S5; who is right already moves its blocks to the others only."""
    states = [state_of(1, a=1, b=5), state_of(1, a=2, b=5), state_of(1, a=1, b=5)]
    infos = sync(trio, states)
    assert [held(state) for state in states] == [[1.0, 5.0]] * 3
    assert all(isinstance(info, zpccl.SharedStateSyncInfo) for info in infos)
    assert infos[1].rx_bytes > 0 and sum(info.tx_bytes for info in infos) == sum(info.rx_bytes for info in infos)
    assert [state.revision for state in states] == [1, 1, 1]


def test_who_is_behind_receives_and_who_is_ahead_is_refused(trio: Run) -> None:
    """S5: the rule of revisions; a refusal changes nothing."""
    sync(trio, [state_of(5, a=1) for _ in range(3)])
    states = [state_of(6, a=7), state_of(0, a=0), state_of(9, a=9)]
    outcomes = sync(trio, states)
    assert [held(state) for state in states] == [[7.0], [7.0], [9.0]]
    assert [state.revision for state in states] == [6, 6, 9]
    assert isinstance(outcomes[2], zpccl.InvalidUsage) and "9" in str(outcomes[2])


def test_receive_only_is_never_elected(trio: Run) -> None:
    states = [state_of(1, a=1), state_of(1, a=2), state_of(1, a=2)]
    sync(trio, states, [Strategy.ENFORCE_POPULAR, Strategy.RECEIVE_ONLY, Strategy.RECEIVE_ONLY])
    assert [held(state) for state in states] == [[1.0]] * 3


def test_send_only_wins_and_never_receives(trio: Run) -> None:
    states = [state_of(1, a=1), state_of(1, a=1), state_of(1, a=3)]
    sync(trio, states, [Strategy.ENFORCE_POPULAR, Strategy.ENFORCE_POPULAR, Strategy.SEND_ONLY])
    assert [held(state) for state in states] == [[3.0]] * 3


def test_send_only_peers_that_differ_are_refused(trio: Run) -> None:
    states = [state_of(1, a=1), state_of(1, a=2), state_of(1, a=3)]
    outcomes = sync(trio, states, [Strategy.ENFORCE_POPULAR, Strategy.SEND_ONLY, Strategy.SEND_ONLY])
    assert [type(outcome) for outcome in outcomes[1:]] == [zpccl.InvalidUsage] * 2
    assert isinstance(outcomes[0], zpccl.SharedStateSyncInfo)
    assert [held(state) for state in states] == [[1.0], [2.0], [3.0]]


def test_nobody_sends(trio: Run) -> None:
    outcomes = sync(trio, [state_of(a=1) for _ in range(3)], [Strategy.RECEIVE_ONLY] * 3)
    assert [type(outcome) for outcome in outcomes] == [zpccl.NoSharedState] * 3
    assert outcomes[0].result == Result.NO_SHARED_STATE_AVAILABLE


ODD_STATES = {
    "another key": state_of(1, a=1, c=1),
    "a key too few": state_of(1, a=1),
    "a key too many": state_of(1, a=1, b=1, c=1),
    "another size": state_of(1, a=1, b=[1, 1]),
}


@pytest.mark.parametrize("what", ODD_STATES)
def test_another_set_of_keys_is_refused_and_the_rest_go_on(trio: Run, what: str) -> None:
    states = [state_of(1, a=1, b=2), ODD_STATES[what], state_of(1, a=1, b=2)]
    outcomes = sync(trio, states)
    assert isinstance(outcomes[1], zpccl.InvalidArgument)
    assert "'b'" in str(outcomes[1]) or "'c'" in str(outcomes[1])
    assert all(isinstance(outcome, zpccl.SharedStateSyncInfo) for outcome in outcomes[::2])
    assert held(states[0]) == held(states[2]) == [1.0, 2.0]


def test_contents_may_differ_where_that_is_allowed(trio: Run) -> None:
    def make(value: float, revision: int) -> zpccl.SharedState:
        tensors = [np.full(4, value, np.float64), np.full(4, 1.0)]
        infos = [
            zpccl.TensorInfo.from_numpy(tensors[0], "local", allow_content_inequality=True),
            zpccl.TensorInfo.from_numpy(tensors[1], "global"),
        ]
        state = zpccl.SharedState(infos)
        state.revision = revision
        return state

    states = [make(1, 1), make(2, 1), make(3, 0)]
    sync(trio, states)
    assert [held(state)[0] for state in states[:2]] == [1.0, 2.0]
    assert held(states[2])[0] in (1.0, 2.0)  # It is behind, hence receives all.


def test_many_tensors_of_many_blocks(trio: Run) -> None:
    """S5: 300 tensors, one of several blocks with a ragged end; only blocks that differ travel."""
    big = np.random.default_rng(0).integers(0, 255, 2 * limits.STATE_BLOCK_BYTES + 77, np.uint8)

    def make(index: int) -> zpccl.SharedState:
        mine = big.copy()
        if index == 2:
            mine[-1] ^= 255
        tensors = {f"t{n:03}": np.full(n + 1, n if index < 2 else -n, np.int16) for n in range(300)}
        infos = [zpccl.TensorInfo.from_numpy(tensor, name) for name, tensor in {**tensors, "big": mine}.items()]
        state = zpccl.SharedState(infos)
        state.push_revision()
        return state

    states = [make(index) for index in range(3)]
    infos = sync(trio, states)
    for ours, theirs in zip(states[0].tensor_infos, states[2].tensor_infos, strict=True):
        assert np.array_equal(ours.tensor, theirs.tensor)
    assert infos[2].rx_bytes < limits.STATE_BLOCK_BYTES // 2


def test_alone_in_the_group() -> None:
    with local_run(2, groups=[0, 1]) as run:
        outcomes = sync(run, [state_of(a=1), state_of(a=2)])
        assert [outcome.result for outcome in outcomes] == [Result.TOO_FEW_PEERS] * 2


def test_groups_sync_independently() -> None:
    with local_run(4, groups=[0, 1, 0, 1]) as run:
        states = [state_of(1, a=1), state_of(1, b=2), state_of(0, a=0), state_of(0, b=0)]
        sync(run, states)
        assert [held(state) for state in states] == [[1.0], [2.0], [1.0], [2.0]]


def test_a_sync_and_another_call_at_once_are_refused(trio: Run) -> None:
    state = state_of(a=1)
    begun = [trio.start(trio.comms[0].sync_shared_state, state), trio.start(trio.comms[1].update_topology)]
    assert [type(failure(future)) for future in begun] == [zpccl.InvalidUsage] * 2
    assert [held(state), state.revision] == [[1.0], 0]
    sync(trio, [state_of(1, a=2) for _ in range(3)])


def test_a_lost_member_is_not_waited_for(trio: Run) -> None:
    states = [state_of(1, a=1), state_of(0, a=0)]
    begun = [trio.start(comm.sync_shared_state, state) for comm, state in zip(trio.comms, states, strict=False)]
    until(lambda: all(comm._loop is not None and comm._loop._calls for comm in trio.comms[:2]))
    trio.comms[2].close()
    for future in begun:
        finish(future)
    assert held(states[1]) == [1.0]


# --- Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "x" * (limits.KEY_CHARS_MAX + 1), 5, None, b"x", "\ud800"])
def test_bad_names_are_refused(name: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="name"):
        zpccl.TensorInfo.from_numpy(np.ones(3), name)


READ_ONLY = np.ones(3)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("tensor", [np.ones(10)[::2], READ_ONLY, np.ones(0), np.ones(3, bool), [1.0], None])
def test_bad_tensors_are_refused(tensor: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument):
        zpccl.TensorInfo.from_numpy(tensor, "x")


def test_bad_states_are_refused() -> None:
    one = zpccl.TensorInfo.from_numpy(np.ones(3), "x")
    for infos in ([], [one, one], [one, zpccl.TensorInfo.from_numpy(np.ones(3), "x")], [np.ones(3)], None):
        with pytest.raises(zpccl.InvalidArgument):
            zpccl.SharedState(infos)  # type: ignore[arg-type]


@pytest.mark.parametrize("revision", [-1, limits.REVISION_MAX + 1, 1.5, "1", None, True])
def test_bad_revisions_are_refused(revision: Any) -> None:
    state = state_of(a=1)
    with pytest.raises(zpccl.InvalidArgument, match="revision"):
        state.revision = revision
    assert state.revision == 0


def test_revisions_begin_at_zero_and_end_at_the_bound() -> None:
    state = state_of(a=1)
    state.push_revision()
    assert state.revision == 1
    state.revision = limits.REVISION_MAX
    with pytest.raises(zpccl.InvalidArgument):
        state.push_revision()


def test_bad_calls_are_refused(trio: Run) -> None:
    comm = trio.comms[0]
    for state, strategy in [("state", Strategy.SEND_ONLY), (state_of(a=1), 7), (state_of(a=1), "send"), (None, 0)]:
        with pytest.raises(zpccl.InvalidArgument):
            comm.sync_shared_state(state, strategy)  # type: ignore[arg-type]


def test_a_state_whose_keys_do_not_fit_one_message_is_refused(trio: Run) -> None:
    """The master takes no longer message: sent, it would cost the connection, again and again."""
    tensor = np.ones(1, np.uint8)
    infos = [zpccl.TensorInfo.from_numpy(tensor, f"{index:01000}") for index in range(9000)]
    with pytest.raises(zpccl.InvalidArgument, match="names"):
        trio.comms[0].sync_shared_state(zpccl.SharedState(infos))
    states = [state_of(1, a=1), state_of(0, a=0), state_of(0, a=0)]
    sync(trio, states)
    assert [held(state) for state in states] == [[1.0]] * 3


def test_tensors_that_share_a_part_of_their_memory_are_refused() -> None:
    """They could be elected with different contents. Tied weights, which share all of it, are fine."""
    array = np.ones(10)
    infos = [zpccl.TensorInfo.from_numpy(array[:6], "x"), zpccl.TensorInfo.from_numpy(array[5:], "y")]
    with pytest.raises(zpccl.InvalidArgument, match="'x' and 'y'"):
        zpccl.SharedState(infos)
    tied = [zpccl.TensorInfo.from_numpy(array, name) for name in ("embedding", "head")]
    assert len(zpccl.SharedState(tied).tensor_infos) == 2
