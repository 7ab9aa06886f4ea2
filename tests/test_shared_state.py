"""Shared state through the whole stack. protocol/test_election_table.py has the elections."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from e2e.local import Run, failure, finish, local_run

import zpccl
from zpccl import communicator, limits
from zpccl.errors import Result
from zpccl.protocol import events
from zpccl.protocol.messages import Kick
from zpccl.state.transfer import StateTransfer
from zpccl.state.workers import wait_for_end
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
    """Syncs all members. Returns the info or the error of each."""
    strategies = strategies or [Strategy.ENFORCE_POPULAR] * len(states)
    begun = [
        run.start(comm.sync_shared_state, state, strategy)
        for comm, state, strategy in zip(run.comms, states, strategies, strict=True)
    ]
    return [failure(future) or finish(future) for future in begun]


def test_the_most_popular_contents_win(trio: Run) -> None:
    """S5; peers that hold the right contents only send blocks."""
    states = [state_of(1, a=1, b=5), state_of(1, a=2, b=5), state_of(1, a=1, b=5)]
    infos = sync(trio, states)
    assert [held(state) for state in states] == [[1.0, 5.0]] * 3
    assert all(isinstance(info, zpccl.SharedStateSyncInfo) for info in infos)
    assert infos[1].rx_bytes > 0 and sum(info.tx_bytes for info in infos) == sum(info.rx_bytes for info in infos)
    assert [state.revision for state in states] == [1, 1, 1]


def test_within_a_host_blocks_travel_as_they_are(trio: Run) -> None:
    """This includes blocks that compress well: compressing would take longer than sending."""
    numbers = np.arange(10**6, dtype=np.float32)
    states = [state_of(1, a=numbers), state_of(1, a=numbers), state_of(0, a=np.zeros(10**6))]
    infos = sync(trio, states)
    assert infos[2].rx_bytes > numbers.nbytes and np.array_equal(states[2].tensor_infos[0].tensor, numbers)


def test_who_is_behind_receives_and_who_is_ahead_is_refused(trio: Run) -> None:
    """S5: the rule of revisions; a refusal changes nothing."""
    sync(trio, [state_of(5, a=1) for _ in range(3)])
    states = [state_of(6, a=7), state_of(0, a=0), state_of(9, a=9)]
    outcomes = sync(trio, states)
    assert [held(state) for state in states] == [[7.0], [7.0], [9.0]]
    assert [state.revision for state in states] == [6, 6, 9]
    assert isinstance(outcomes[2], zpccl.InvalidUsage) and "9" in str(outcomes[2])


def test_send_only_wins_and_never_receives(trio: Run) -> None:
    states = [state_of(1, a=1), state_of(1, a=1), state_of(1, a=3)]
    sync(trio, states, [Strategy.ENFORCE_POPULAR, Strategy.ENFORCE_POPULAR, Strategy.SEND_ONLY])
    assert [held(state) for state in states] == [[3.0]] * 3


def test_nobody_sends(trio: Run) -> None:
    outcomes = sync(trio, [state_of(a=1) for _ in range(3)], [Strategy.RECEIVE_ONLY] * 3)
    assert [type(outcome) for outcome in outcomes] == [zpccl.NoSharedState] * 3
    assert outcomes[0].result == Result.NO_SHARED_STATE_AVAILABLE


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
    assert held(states[2])[0] in (1.0, 2.0)  # It is behind, so it receives everything.


@pytest.mark.parametrize("allowed", [1, np.True_], ids=repr)
def test_what_is_as_good_as_true_allows_it(trio: Run, allowed: Any) -> None:
    """Users set this attribute. No message can carry these values."""
    states = [state_of(1, a=value) for value in range(3)]
    for state in states:
        state.tensor_infos[0].allow_content_inequality = allowed
    sync(trio, states)
    assert [held(state) for state in states] == [[0.0], [1.0], [2.0]]


def test_many_tensors_of_many_blocks(trio: Run) -> None:
    """S5: 300 tensors, one with several blocks, the last one incomplete. Only blocks that differ travel."""
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


def test_contents_may_be_compared_by_xxh3(trio: Run) -> None:
    states = [zpccl.SharedState(state_of(a=value, b=1).tensor_infos, digest="xxh3") for value in (1, 1, 2)]
    sync(trio, states)
    assert [held(state) for state in states] == [[1.0, 1.0]] * 3


def test_another_kind_of_digest_is_refused_and_the_rest_go_on(trio: Run) -> None:
    states = [zpccl.SharedState(state_of(a=1).tensor_infos, digest=kind) for kind in ("blake3", "xxh3", "blake3")]
    outcomes = sync(trio, states)
    assert isinstance(outcomes[1], zpccl.InvalidArgument) and "xxh3 here, blake3 there" in str(outcomes[1])
    assert all(isinstance(outcome, zpccl.SharedStateSyncInfo) for outcome in outcomes[::2])


def test_an_array_that_was_resized_is_named(trio: Run) -> None:
    array = np.zeros(10)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "moments")])
    array.resize(11, refcheck=False)
    with pytest.raises(zpccl.InvalidArgument, match=r"'moments' had 10 elements of DOUBLE .* has 11"):
        trio.comms[0].sync_shared_state(state)


def test_a_sync_and_another_call_at_once_are_refused(trio: Run) -> None:
    state = state_of(a=1)
    calls: list[Callable[[], Any]] = [
        lambda: trio.comms[0].sync_shared_state(state),
        trio.comms[1].update_topology,
    ]
    begun = [trio.start(call) for call in calls]
    assert [type(failure(future)) for future in begun] == [zpccl.InvalidUsage] * 2
    assert [held(state), state.revision] == [[1.0], 0]
    sync(trio, [state_of(1, a=2) for _ in range(3)])


def big_state(value: float, revision: int) -> zpccl.SharedState:
    tensor = np.full(limits.STATE_BLOCK_BYTES // 2, value, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(tensor, "x")])
    state.revision = revision
    return state


def test_who_fetches_is_told_how_far_it_is(trio: Run) -> None:
    """It runs only in the thread that made the call. A peer that only sends gets no progress."""
    told: list[list[tuple[int, zpccl.Progress]]] = [[], [], []]
    threads: list[int] = [0, 0, 0]

    def sync_noting(index: int) -> None:
        threads[index] = threading.get_ident()
        trio.comms[index].sync_shared_state(states[index])

    def noting(index: int) -> Callable[[zpccl.Progress], None]:
        return lambda progress: told[index].append((threading.get_ident(), progress))

    for index, comm in enumerate(trio.comms):
        comm.on_progress(noting(index))
    states = [big_state(1, 1), big_state(1, 1), big_state(0, 0)]
    for future in [trio.start(sync_noting, index) for index in range(3)]:
        finish(future)
    assert not told[0] and not told[1]
    assert {thread for thread, _ in told[2]} == {threads[2]}
    progress = [progress for _, progress in told[2]]
    size = 2 * limits.STATE_BLOCK_BYTES
    assert [item.is_done for item in progress] == [False] * (len(progress) - 1) + [True]
    assert {item.operation for item in progress} == {"fetch"}
    assert (progress[-1].bytes_done, progress[-1].bytes_expected) == (size, size)
    done = [item.bytes_done for item in progress]
    assert done == sorted(done) and len(done) > 1

    trio.comms[2].on_progress(None)
    sync(trio, [big_state(2, 2), big_state(2, 2), states[2]])
    assert len(told[2]) == len(done)


def test_a_progress_callback_that_fails_does_not_fail_the_sync(trio: Run, caplog: pytest.LogCaptureFixture) -> None:
    """S5: the others count this peer."""

    def fail(_: zpccl.Progress) -> None:
        raise RuntimeError("no terminal here")

    trio.comms[2].on_progress(fail)
    states = [state_of(1, a=1), state_of(1, a=1), state_of(0, a=0)]
    outcomes = sync(trio, states)
    assert all(isinstance(outcome, zpccl.SharedStateSyncInfo) for outcome in outcomes)
    assert held(states[2]) == [1.0]
    assert "no terminal here" in caplog.text
    with pytest.raises(zpccl.InvalidArgument, match="called"):
        trio.comms[2].on_progress(5)  # type: ignore[arg-type]


# --- Between calls ----------------------------------------------------------------------------------------------------


def test_a_tensor_without_elements_left_is_refused_before_anybody_hears_of_it(trio: Run) -> None:
    array = np.ones(1, np.float32)
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, "a")])
    array.resize(0, refcheck=False)
    with pytest.raises(zpccl.InvalidArgument, match=r"'a'.*no elements"):
        trio.comms[0].sync_shared_state(state)


def test_a_tensor_that_became_read_only_is_refused(trio: Run) -> None:
    state = state_of(1, a=1)
    state.tensor_infos[0].tensor.flags.writeable = False
    with pytest.raises(zpccl.InvalidArgument, match=r"'a'.*read-only"):
        trio.comms[0].sync_shared_state(state)


def test_tensors_that_came_to_share_a_part_of_their_memory_are_refused(trio: Run) -> None:
    whole = np.zeros(10, np.float32)
    state = state_of(1, a=[1] * 6, b=[2] * 6)
    state.tensor_infos[0].tensor, state.tensor_infos[1].tensor = whole[:6], whole[4:]
    with pytest.raises(zpccl.InvalidArgument, match="'a' and 'b'"):
        trio.comms[0].sync_shared_state(state)


def test_a_state_keeps_its_tensors_alive(trio: Run) -> None:
    """S4: nobody else holds these tensors, and their memory is not given to others."""
    states = [big_state(value, revision) for value, revision in ((5, 1), (5, 1), (0, 0))]
    gc.collect()
    sync(trio, states)
    others = [np.full_like(state.tensor_infos[0].tensor, 9) for state in states]
    assert all((state.tensor_infos[0].tensor == 5).all() for state in states)
    assert all((other == 9).all() for other in others)


@pytest.mark.torch
def test_torch_tensors_that_were_given_other_memory(trio: Run) -> None:
    """S4: `tensor.data = ...` and `resize_` free memory that a state refers to."""
    import torch

    tensors = [torch.full((1000,), float(index)) for index in range(3)]
    states = [zpccl.SharedState([zpccl.TensorInfo.from_torch(tensor, "x")]) for tensor in tensors]
    for tensor in tensors:
        tensor.data = torch.full((1000,), 3.0)
    states[2].tensor_infos[0].tensor.zero_()
    for state in states[:2]:
        state.push_revision()
    sync(trio, states)
    assert all(torch.equal(tensor, torch.full((1000,), 3.0)) for tensor in tensors)
    tensors[0].resize_(0)
    with pytest.raises(zpccl.InvalidArgument, match="no elements"):
        trio.comms[0].sync_shared_state(states[0])


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


@pytest.mark.parametrize(
    "limit", [0, 1, limits.UPLOAD_LIMIT_MIN_BYTES - 1, -1, float("inf"), float("nan"), "1e9", True]
)
def test_bad_upload_limits_are_refused(limit: Any) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="upload_limit"):
        zpccl.Communicator("127.0.0.1:1", upload_limit=limit)


def test_an_upload_limit_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZPCCL_UPLOAD_LIMIT", "5")
    with pytest.raises(zpccl.InvalidArgument, match="ZPCCL_UPLOAD_LIMIT 5 "):
        zpccl.Communicator("127.0.0.1:1")
    monkeypatch.setenv("ZPCCL_UPLOAD_LIMIT", "1e9")  # upload_limit=1e9 is valid, so the error must say what is not.
    with pytest.raises(zpccl.InvalidArgument, match=r"ZPCCL_UPLOAD_LIMIT is '1e9'; give a whole number"):
        zpccl.Communicator("127.0.0.1:1")


def test_state_moves_below_an_upload_limit() -> None:
    with local_run(3, upload_limit=64 * limits.MIB) as run:
        states = [state_of(1, a=np.full(10**6, 3)), state_of(0, a=np.ones(10**6)), state_of(0, a=np.ones(10**6))]
        sync(run, states)
        assert [held(state) for state in states] == [[3.0]] * 3


def test_bad_calls_are_refused(trio: Run) -> None:
    comm = trio.comms[0]
    for state, strategy in [("state", Strategy.SEND_ONLY), (state_of(a=1), 7), (state_of(a=1), "send"), (None, 0)]:
        with pytest.raises(zpccl.InvalidArgument):
            comm.sync_shared_state(state, strategy)  # type: ignore[arg-type]


def test_a_state_whose_keys_do_not_fit_one_message_is_refused(trio: Run) -> None:
    """The master accepts no longer message: sending one would cost the connection, again and again."""
    tensor = np.ones(1, np.uint8)
    infos = [zpccl.TensorInfo.from_numpy(tensor, f"{index:01000}") for index in range(9000)]
    with pytest.raises(zpccl.InvalidArgument, match="names"):
        trio.comms[0].sync_shared_state(zpccl.SharedState(infos))
    states = [state_of(1, a=1), state_of(0, a=0), state_of(0, a=0)]
    sync(trio, states)
    assert [held(state) for state in states] == [[1.0]] * 3


def test_tensors_that_share_a_part_of_their_memory_are_refused() -> None:
    """They could be elected with different contents. Tied weights share all of their memory and are allowed."""
    array = np.ones(10)
    infos = [zpccl.TensorInfo.from_numpy(array[:6], "x"), zpccl.TensorInfo.from_numpy(array[5:], "y")]
    with pytest.raises(zpccl.InvalidArgument, match="'x' and 'y'"):
        zpccl.SharedState(infos)
    tied = [zpccl.TensorInfo.from_numpy(array, name) for name in ("embedding", "head")]
    assert len(zpccl.SharedState(tied).tensor_infos) == 2


def test_nothing_is_left_of_a_sync(trio: Run) -> None:
    """B1: a peer makes thousands of syncs."""
    for revision in range(3):
        sync(trio, [state_of(revision, a=revision) for _ in range(3)])
    assert all(not comm._loop._attempts and not comm._loop._calls for comm in trio.comms if comm._loop is not None)


@pytest.mark.parametrize("how", ["closed", "removed"])
def test_a_peer_that_ends_while_its_state_is_digested(trio: Run, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """L1: its call raises, even if the call was not made by then."""
    comm, states = trio.comms[0], [state_of(1, a=number) for number in range(3)]

    def make(*arguments: Any, **keywords: Any) -> StateTransfer:
        transfer = StateTransfer(*arguments, **keywords)
        if how == "closed":
            comm.close()
        else:
            loop = comm._loop
            assert loop is not None
            loop._post(events.MasterMessageReceived(Kick(Result.RANK_CONNECTION_LOST, "a reason")))
            wait_for_end(loop._thread, loop._ended)
        return transfer

    monkeypatch.setattr(communicator, "StateTransfer", make)
    error = failure(trio.start(comm.sync_shared_state, states[0]))
    assert isinstance(error, zpccl.InvalidUsage if how == "closed" else zpccl.Kicked)
    assert held(states[0]) == [0.0]


def test_a_peer_that_is_out_of_descriptors(trio: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: its call raises an error of this library, before the others hear of it, and may be made again."""
    states = [state_of(1, a=1) for _ in range(3)]
    with monkeypatch.context() as patched:
        patched.setattr(os, "eventfd", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        error = failure(trio.start(trio.comms[0].sync_shared_state, states[0]))
    assert isinstance(error, zpccl.InternalError) and "Too many open files" in str(error)
    assert all(isinstance(info, zpccl.SharedStateSyncInfo) for info in sync(trio, states))


def test_tied_tensors_that_others_hold_different_contents_of(trio: Run) -> None:
    """S5: they cannot hold both. All get an error that names the peer at fault, and nothing changes."""
    tied = np.zeros(3, np.float32)
    infos = [zpccl.TensorInfo.from_numpy(tied, name) for name in "ab"]
    states = [state_of(1, a=[1] * 3, b=[2] * 3), state_of(1, a=[1] * 3, b=[2] * 3), zpccl.SharedState(infos)]
    errors = sync(trio, states)
    assert [type(error) for error in errors] == [zpccl.PeerLost, zpccl.PeerLost, zpccl.InvalidUsage]
    assert all("peer2: tensors 'a' and 'b' are the same memory" in str(error) for error in errors)
    assert [held(state) for state in states] == [[1.0, 2.0], [1.0, 2.0], [0.0, 0.0]]
    assert [state.revision for state in states] == [1, 1, 0] and trio.comms[0].world_size == 3


@pytest.mark.parametrize("revision", [0, 1])
def test_tied_tensors_of_which_one_may_differ(trio: Run, revision: int) -> None:
    """If that tensor is not fetched, it has no elected contents, and may get those of the other one."""
    states = []
    for number in range(3):
        tied = np.full(3, number == 2, np.float32)
        infos = [zpccl.TensorInfo.from_numpy(tied, name, allow_content_inequality=name == "b") for name in "ab"]
        states.append(zpccl.SharedState(infos))
        states[-1].revision = revision if number == 2 else 1
    assert not any(isinstance(each, Exception) for each in sync(trio, states))
    assert [held(state) for state in states] == [[0.0, 0.0]] * 3
