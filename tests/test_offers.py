"""State that members offer while they train, fetched ahead by joiners: several communicators in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from e2e.harness import until
from e2e.local import Run, finish, local_run

import zpccl
from zpccl import limits
from zpccl.limits import KIB, MIB
from zpccl.state.contents import Contents
from zpccl.state.offers import LentRegion, Offers
from zpccl.state.serving import Server
from zpccl.types import DigestKind

pytestmark = pytest.mark.e2e

COUNT = 6 * MIB
"""Size of the tensor `w`: several blocks."""


def state_of(value: int, revision: int = 0, **free: int) -> zpccl.SharedState:
    """A tensor `w` of random bytes made from a number, and a `b` with that number; `free` may differ between peers."""
    rng = np.random.default_rng(value)
    infos = [
        zpccl.TensorInfo.from_numpy(rng.integers(0, 255, COUNT, np.uint8), "w"),
        zpccl.TensorInfo.from_numpy(np.full(5, value, np.int64), "b"),
    ]
    for name, contents in free.items():
        array = np.full(5, contents, np.int64)
        infos.append(zpccl.TensorInfo.from_numpy(array, name, allow_content_inequality=True))
    state = zpccl.SharedState(infos)
    state.revision = revision
    return state


def array(state: zpccl.SharedState, name: str) -> np.ndarray[Any, Any]:
    (found,) = (info.tensor for info in state.tensor_infos if info.name == name)
    assert isinstance(found, np.ndarray)
    return found


def is_equal(one: zpccl.SharedState, other: zpccl.SharedState) -> bool:
    same = all(np.array_equal(array(one, name), array(other, name)) for name in "wb")
    return same and one.revision == other.revision


class Joining:
    """A run whose members offer states, and a peer that joins it.

    Attributes:
        progress: what its callback got.
        seen: set when the joiner has received some of the bytes.
        go_on: from then on, the joiner waits until this is set.
    """

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = run
        self.members = list(run.comms)
        self.progress: list[zpccl.Progress] = []
        self.seen, self.go_on = threading.Event(), threading.Event()
        self.comm = zpccl.Communicator(run.master.address, name="joiner")

        def on_progress(progress: zpccl.Progress) -> None:
            self.progress.append(progress)
            if progress.bytes_done > 0:
                self.seen.set()
                assert self.go_on.wait(60)

        monkeypatch.setattr(limits, "PROGRESS_INTERVAL_NS", 0)  # So that every callback is due.
        self.comm.on_progress(on_progress)

    def connect(self, state: zpccl.SharedState, **options: Any) -> Future[None]:
        return self.run.start(self.comm.connect, prefetch=state, **options)

    def admit(self, connected: Future[None]) -> None:
        """Lets the joiner go on. Members hear when it is ready, and admit it."""
        self.go_on.set()
        while not connected.done():
            pending = [finish(f) for f in [self.run.start(comm.are_peers_pending) for comm in self.members]]
            if any(pending):
                for future in [self.run.start(comm.update_topology) for comm in self.members]:
                    finish(future)
                break
        finish(connected)

    def sync(self, states: list[zpccl.SharedState], own: zpccl.SharedState) -> zpccl.SharedStateSyncInfo:
        """All sync. Returns the joiner's info."""
        others = [
            self.run.start(comm.sync_shared_state, state) for comm, state in zip(self.members, states, strict=True)
        ]
        info = finish(self.run.start(self.comm.sync_shared_state, own))
        for future in others:
            finish(future)
        return info


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    """Two members and a joiner."""
    with local_run(2) as run:
        joining = Joining(run, monkeypatch)
        yield joining
        joining.go_on.set()
        joining.comm.close()


def offers_of(joining: Joining, states: list[zpccl.SharedState], **options: Any) -> list[zpccl.Offer]:
    made = [comm.offer_state(state, **options) for comm, state in zip(joining.run.comms, states, strict=True)]
    return [offer for offer in made if offer is not None]


@pytest.mark.parametrize("copy", [True, False])
def test_members_go_on_while_a_joiner_fetches(joining: Joining, copy: bool) -> None:
    """S6: they go on reducing, and hear of it only when it is ready. Then the sync moves no part of the state."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    offers_of(joining, states, copy=copy)
    connected = joining.connect(own)
    assert joining.seen.wait(60)
    run = joining.run
    for _ in range(3):
        run.all(lambda comm: comm.all_reduce(np.ones(4)))
        assert run.all(lambda comm: comm.are_peers_pending()) == [False, False]
        run.all(lambda comm: comm.update_topology())
    assert not connected.done() and all(comm.world_size == 2 for comm in run.comms)
    joining.admit(connected)
    assert is_equal(own, states[0])
    assert joining.sync(states, own).rx_bytes < 1 * KIB
    assert is_equal(own, states[0])


def test_the_state_has_gone_on_meanwhile(joining: Joining) -> None:
    """The sync fetches the difference, which is one block of six here."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    offers_of(joining, states)
    joining.admit(joining.connect(own))
    for state in states:
        array(state, "w")[0] ^= 1
        state.push_revision()
    assert MIB < joining.sync(states, own).rx_bytes < 3 * MIB  # An idle source is asked for it again.
    assert is_equal(own, states[0])


def test_a_member_dies_while_it_serves(joining: Joining) -> None:
    """The other member serves the rest."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    offers_of(joining, states)
    connected = joining.connect(own)
    assert joining.seen.wait(60)
    joining.members.pop(0).close()
    joining.admit(connected)
    assert is_equal(own, states[1])


def test_who_writes_copies_first(joining: Joining) -> None:
    """The tensors themselves are offered until just before they are written."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    expected = state_of(7, revision=4)
    offers = offers_of(joining, states, copy=False)
    connected = joining.connect(own)
    assert joining.seen.wait(60)
    for offer, state in zip(offers, states, strict=True):
        offer.before_write(["w"])
        array(state, "w")[:] = 0
    joining.admit(connected)
    assert is_equal(own, expected)
    assert all(offer.is_open for offer in offers)


def changing_when_served(monkeypatch: pytest.MonkeyPatch, change: Callable[[], None]) -> None:
    """Makes a change after everything was digested, and before anything is sent."""
    original = Server.on_request

    def on_request(self: Server, *arguments: Any) -> None:
        change()
        original(self, *arguments)

    monkeypatch.setattr(Server, "on_request", on_request)


def test_who_writes_without_a_word(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5: the writer's offer ends, and the error names the tensor. The joiner gets the other member's whole state."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    expected = state_of(7, revision=4)
    offers = offers_of(joining, states, copy=False)

    def change() -> None:
        array(states[0], "w")[:] = 0

    changing_when_served(monkeypatch, change)
    joining.admit(joining.connect(own))
    assert is_equal(own, expected)
    until(lambda: not offers[0].is_open)
    assert "'w'" in offers[0].error
    assert offers[1].is_open and not offers[1].error


def test_all_write_without_a_word(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner is admitted, with its memory as it was."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    offers_of(joining, states, copy=False)

    def change() -> None:
        for state in states:
            array(state, "w")[:] = 0

    changing_when_served(monkeypatch, change)
    joining.admit(joining.connect(own))
    assert is_equal(own, state_of(1))


def test_an_offer_is_replaced_while_it_is_fetched(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner hears of it, and gets all of the new offer."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    first = offers_of(joining, states)
    asked, on_request = threading.Event(), Server.on_request

    def request(server: Server, *arguments: Any) -> None:
        """The joiner gets no bytes of the first offers."""
        if any(getattr(offer._transfer, "_server", None) is server for offer in first):
            asked.set()
        else:
            on_request(server, *arguments)

    monkeypatch.setattr(Server, "on_request", request)
    connected = joining.connect(own)
    assert asked.wait(60)
    states = [state_of(8, revision=5) for _ in range(2)]
    offers_of(joining, states)
    assert not any(offer.is_open for offer in first)
    joining.admit(connected)
    assert is_equal(own, states[0])


def test_the_highest_revision_is_fetched(joining: Joining) -> None:
    states, own = [state_of(7, revision=4), state_of(8, revision=5)], state_of(1)
    offers_of(joining, states)
    joining.admit(joining.connect(own))
    assert is_equal(own, states[1])


def test_keys_that_may_differ_come_from_one_of_those_who_offer(joining: Joining) -> None:
    """All members have the same contents of all other keys: these come from all members. The progress is that of all
    keys."""
    states, own = [state_of(7, revision=4, rng=number) for number in (1, 2)], state_of(1, rng=3)
    offers_of(joining, states)
    joining.admit(joining.connect(own))
    assert is_equal(own, states[0])
    assert array(own, "rng")[0] in (1, 2)
    done = [progress.bytes_done for progress in joining.progress]
    assert done == sorted(done) and done[-1] == COUNT + 2 * 40


def test_a_prefetch_that_takes_too_long(joining: Joining) -> None:
    """It is given up, and the memory is as before."""
    offers_of(joining, [state_of(7, revision=4) for _ in range(2)])
    own = state_of(1)
    joining.admit(joining.connect(own, prefetch_timeout=0.001))
    assert is_equal(own, state_of(1))


def test_the_first_of_a_run_has_nobody_to_fetch_from() -> None:
    """L1."""
    with local_run(0) as run:
        comm = zpccl.Communicator(run.master.address)
        finish(run.start(comm.connect, prefetch=state_of(1)))
        assert comm.world_size == 1
        comm.close()


def test_offers_end(joining: Joining) -> None:
    """By a withdrawal, by another offer, or by None."""
    comm, state = joining.run.comms[0], state_of(7)
    first, is_open = comm.offer_state(state), []
    assert first is not None
    is_open.append(first.is_open)
    first.withdraw()
    first.withdraw()
    is_open.append(first.is_open)
    second = comm.offer_state(state)
    assert second is not None
    is_open.append(second.is_open)
    comm.offer_state(None)
    is_open.append(second.is_open)
    assert is_open == [True, False, True, False]
    second.before_write()
    for names in ("nothing", ["nothing"]):
        with pytest.raises(zpccl.InvalidArgument, match="'nothing'"):
            second.before_write(names)


def test_bad_arguments(joining: Joining) -> None:
    comm: Any = joining.run.comms[0]
    with pytest.raises(zpccl.InvalidArgument, match="offer_state"):
        comm.offer_state("state")
    with pytest.raises(zpccl.InvalidUsage, match="not connected"):
        joining.comm.offer_state(state_of(1))
    late: Any = joining.comm
    with pytest.raises(zpccl.InvalidArgument, match="prefetch is a str"):
        late.connect(prefetch="state")
    with pytest.raises(zpccl.InvalidArgument, match="prefetch_timeout"):
        late.connect(prefetch=state_of(1), prefetch_timeout=-1)


def test_tensors_of_the_same_memory_whose_offered_contents_differ(joining: Joining) -> None:
    """S5: they cannot hold both. The prefetch is given up, and does not begin again and again."""
    states, tied = [state_of(7, revision=4) for _ in range(2)], np.zeros(COUNT, np.uint8)
    for state in states:
        array(state, "w")[:] = 0
    offers_of(
        joining,
        [
            zpccl.SharedState([*s.tensor_infos, zpccl.TensorInfo.from_numpy(np.ones(COUNT, np.uint8), "x")])
            for s in states
        ],
    )
    infos = [zpccl.TensorInfo.from_numpy(tied, name) for name in "wx"]
    own = zpccl.SharedState([*infos, zpccl.TensorInfo.from_numpy(np.zeros(5, np.int64), "b")])
    joining.admit(joining.connect(own))
    assert own.revision == 0 and not tied.any() and not array(own, "b").any()


def test_tensors_of_the_same_memory_of_which_one_may_differ(joining: Joining) -> None:
    """That tensor is fetched first, and the other one after it."""

    def state(value: int, revision: int) -> zpccl.SharedState:
        tied = np.full(COUNT, value, np.uint8)
        infos = [zpccl.TensorInfo.from_numpy(tied, name, allow_content_inequality=name == "x") for name in "wx"]
        made = zpccl.SharedState(infos)
        made.revision = revision
        return made

    offers_of(joining, [state(7, 4), state(7, 4)])
    own = state(1, 0)
    joining.admit(joining.connect(own))
    assert own.revision == 4 and (array(own, "w") == 7).all()


def test_an_interrupt_after_a_prefetch_was_written_comes_too_late(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S5: otherwise the memory would hold contents of another revision than the state's."""
    states, own = [state_of(7, revision=4) for _ in range(2)], state_of(1)
    offers_of(joining, states)
    write = Contents.write

    def interrupt(self: Contents) -> None:
        monkeypatch.setattr(Contents, "write", write)
        write(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Contents, "write", interrupt)
    joining.go_on.set()
    with pytest.raises(KeyboardInterrupt):
        finish(joining.connect(own))
    assert is_equal(own, states[0])


def test_an_offer_that_is_made_while_the_communicator_closes(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: once close() has returned, no thread reads the tensors."""
    comm, made = joining.members[0], []
    withdraw, read = Offers.withdraw, LentRegion.read

    def slow(self: LentRegion, offset: int, size: int) -> memoryview:
        time.sleep(0.2)  # Long enough to be still reading when close() returns.
        return read(self, offset, size)

    def offer_then(self: Offers) -> None:
        withdraw(self)
        monkeypatch.setattr(Offers, "withdraw", withdraw)
        regions = state_of(1).regions()
        made.append(self.offer(1, regions, (), DigestKind.BLAKE3, None, copy=False))

    monkeypatch.setattr(LentRegion, "read", slow)
    monkeypatch.setattr(Offers, "withdraw", offer_then)
    comm.close()
    assert not made[0]._thread.is_alive()
