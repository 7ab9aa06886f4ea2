"""Answers of messages, and Works, when something fails or ends in the middle."""

from __future__ import annotations

import errno
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from e2e.harness import until  # noqa: E402
from interpreter import without_collector  # noqa: E402

import zpccl  # noqa: E402
from pytorch import groups  # noqa: E402
from pytorch.programs import Processes  # noqa: E402
from zpccl.torch import pairs  # noqa: E402
from zpccl.torch.configuration import Configuration  # noqa: E402
from zpccl.torch.pairs import Message, Pair  # noqa: E402
from zpccl.torch.rendezvous import Membership  # noqa: E402
from zpccl.torch.work import Part, Work  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


def test_a_future_is_answered_though_the_group_has_just_ended() -> None:
    """L1: the thread of a pair may fail a message after the end."""
    configuration = Configuration(Membership(0, 1, None, (0,), None, dist.HashStore()))
    message = Message()
    future = Work(configuration, [Part(message)], [], 1, 5).get_future()
    configuration.leave(zpccl.InvalidUsage("it ends"), is_orderly=False)
    message.fail(zpccl.InvalidUsage("it has ended"))
    until(future.done, "its answer")


def test_a_callback_waits_for_others_though_the_group_has_just_ended() -> None:
    """L1: the thread that answers both goes on."""
    configuration = Configuration(Membership(0, 1, None, (0,), None, dist.HashStore()))
    one, other, ended = Message(), Message(), threading.Event()

    def callback(_: Any) -> None:
        other.wait(10)
        ended.set()

    Work(configuration, [Part(one)], [], 1, 5).get_future().then(callback)
    configuration.leave(zpccl.InvalidUsage("it ends"), is_orderly=False)

    def answer() -> None:
        for message in (one, other):
            message.fail(zpccl.InvalidUsage("it has ended"))

    threading.Thread(target=answer, daemon=True).start()
    assert ended.wait(5)


def test_callbacks_of_many_collectives_wait_for_one() -> None:
    """L1: the last one to end is the one waited for, and its future needs a thread too."""
    configuration = Configuration(Membership(0, 1, None, (0,), None, dist.HashStore()))
    messages = [Message() for _ in range(20)]
    *futures, last = [Work(configuration, [Part(message)], [], 1, 5).get_future() for message in messages]
    has_ended, callbacks = threading.Event(), threading.Semaphore(0)
    last.add_done_callback(lambda _: has_ended.set())

    def callback(_: Any) -> None:
        if has_ended.wait(20):
            callbacks.release()

    for future in futures:
        future.add_done_callback(callback)
    for message in messages:
        message.fail(zpccl.InvalidUsage("it has ended"))
    assert all(callbacks.acquire(timeout=20) for _ in futures)
    configuration.leave(zpccl.InvalidUsage("it ends"), is_orderly=False)


def test_a_message_is_answered_whatever_the_meeting_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: messages that wait behind it are answered too."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(pairs, "meet", fail)
    pair = Pair(dist.HashStore(), is_lower=True, timeout=timedelta(seconds=5), is_lost=lambda: False)
    messages = [pair.transfer(torch.ones(1), 0, is_sender=True) for _ in range(3)]
    until(lambda: all(message.done() for message in messages), "their answers")
    assert isinstance(messages[0].exception(), zpccl.InternalError)
    pair.close(is_orderly=False)


CALLS: dict[str, Callable[[Any, int, Any], Any]] = {
    "reduces": lambda group, rank, tensor: group.allreduce([tensor]),
    "gathers": lambda group, rank, tensor: group.allgather([[torch.zeros(5), torch.zeros(5)]], [tensor]),
    "sends": lambda group, rank, tensor: (group.recv if rank else group.send)([tensor], 1 - rank, 0),
}


@pytest.mark.parametrize("with_future", [False, True])
@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_has_ended_is_freed_without_a_collection_of_garbage(what: str, with_future: bool) -> None:
    """B1: its tensors too, which are as large as gradients. Hooks of DDP ask for a future before the call has ended."""
    with groups.local_ranks(2) as ranks:

        def call(group: Any, rank: int) -> list[weakref.ref[Any]]:
            tensor = torch.ones(5)
            work = CALLS[what](group, rank, tensor)
            if with_future:
                work.get_future().wait()
            work.wait()
            (part,) = work._parts
            return [weakref.ref(each) for each in (tensor, work, part.handle)]

        ranks.all(call)
        with without_collector():
            found = [reference for references in ranks.all(call) for reference in references]
            until(lambda: not any(reference() is not None for reference in found), "their end")


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_has_failed_is_freed_without_a_collection_of_garbage(what: str) -> None:
    """B1: the error that ends a group is kept with it, and must not keep the tensors of its callers."""
    with groups.local_ranks(2) as ranks:

        def call(group: Any, rank: int) -> weakref.ref[Any]:
            tensor = torch.ones(5)
            with pytest.raises(zpccl.PCCLError):
                CALLS[what](group, rank, tensor).wait()
            return weakref.ref(tensor)

        with without_collector():
            ranks.groups[1].communicator.close()
            until(lambda: ranks.groups[0].communicator.world_size == 1, "the loss of the other rank")
            (tensor,) = ranks.some([0], call)
            until(lambda: tensor() is None, "its end")
        assert ranks.groups[0].error is not None


def test_messages_that_wait_do_not_keep_those_behind_them() -> None:
    """B1: a program may keep the first message."""
    with groups.local_ranks(2) as ranks:
        first = ranks.groups[0].send([torch.ones(1)], 1, 0)
        behind = [ranks.groups[0].send([torch.ones(1)], 1, 0) for _ in range(40)]
        found = [weakref.ref(work._parts[0].handle) for work in behind]
        received = [ranks.groups[1].recv([torch.zeros(1)], 0, 0) for _ in range(41)]
        for work in [first, *behind, *received]:
            work.wait()
        with without_collector():
            del work, behind
            until(lambda: not any(reference() is not None for reference in found), "their end")
        assert first.is_completed()


def test_a_callback_at_the_end_of_the_program_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise Python would end its thread in the middle, and the process would abort."""
    from zpccl.torch import configuration as module

    configuration = Configuration(Membership(0, 1, None, (0,), None, dist.HashStore()))
    configuration.leave(zpccl.InvalidUsage("it ends"), is_orderly=False)
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def callback() -> None:
        begun.set()
        go.wait(10)
        ended.set()

    configuration.run_later(callback)
    assert begun.wait(10)
    join = threading.Thread.join

    def let_go_and_join(thread: threading.Thread, timeout: float | None = None) -> None:
        go.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", let_go_and_join)
    module.wait_for_late_threads()
    assert ended.is_set()


FORKS = """
import os, sys, torch, torch.distributed as dist, zpccl, zpccl.torch
dist.init_process_group("zpccl")
dist.barrier()
if dist.get_rank() == 1:
    child = os.fork()
    if child == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except zpccl.InvalidUsage as error:
            print("fork" in str(error), flush=True)
        dist.destroy_process_group()
        os._exit(0)
    os.waitpid(child, 0)
tensor = torch.ones(1)
if dist.get_rank() == 1:
    input()
dist.all_reduce(tensor)
dist.destroy_process_group()
print(tensor.item())
"""


def test_a_forked_child_that_destroys_the_group_does_not_leave_for_its_parent() -> None:
    """Rank 0 ends the master once all have left, or seem to have left."""
    with Processes(FORKS, 2) as processes:
        assert processes.line(1) == "True"
        processes.tell(1)
        assert [processes.end(rank) for rank in range(2)] == ["2.0\n"] * 2
