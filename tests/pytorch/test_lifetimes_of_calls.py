"""Answers of messages and Works where something fails or ends in the middle."""

from __future__ import annotations

import errno
import threading
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from e2e.harness import until  # noqa: E402

import zpccl  # noqa: E402
from zpccl.torch import pairs  # noqa: E402
from zpccl.torch.configuration import Configuration  # noqa: E402
from zpccl.torch.pairs import Message, Pair  # noqa: E402
from zpccl.torch.rendezvous import Membership  # noqa: E402
from zpccl.torch.work import Part, Work  # noqa: E402

pytestmark = pytest.mark.e2e


def test_a_future_is_answered_though_the_group_has_just_ended() -> None:
    """L1: the thread of a pair may fail a message after that."""
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


def test_a_message_is_answered_whatever_the_meeting_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """L1: others that wait behind it, too."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(pairs, "meet", fail)
    pair = Pair(dist.HashStore(), is_lower=True, timeout=timedelta(seconds=5))
    messages = [pair.transfer(torch.ones(1), 0, is_sender=True) for _ in range(3)]
    until(lambda: all(message.done() for message in messages), "their answers")
    assert isinstance(messages[0].exception(), zpccl.InternalError)
    pair.close(is_orderly=False)
