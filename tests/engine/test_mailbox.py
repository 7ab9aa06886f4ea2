"""The mailbox of a thread: messages of its channels, and items that other threads put into it."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time

import pytest
from engine_mesh import WAIT_S, Mesh, peer_id, send

from zpccl import limits
from zpccl.engine.engine import MessageReceived, Writable
from zpccl.engine.mailbox import Mailbox
from zpccl.errors import InternalError

CHANNEL = 3


def later_ns() -> int:
    return time.monotonic_ns() + int(WAIT_S * limits.SECOND)


@pytest.fixture
def mesh(pair: Mesh) -> Mesh:
    pair.engines[0].open_channel(CHANNEL)
    return pair


def text_of(item: object) -> bytes:
    assert isinstance(item, MessageReceived) and (item.peer, item.channel_id) == (peer_id(0), CHANNEL)
    return item.body.read()


def test_what_other_threads_put_there_comes_in_order() -> None:
    mailbox = Mailbox()
    assert mailbox.take(0) == []
    other = threading.Thread(target=lambda: list(map(mailbox.put, range(3))))
    other.start()
    got: list[int] = []
    while len(got) < 3:
        got += mailbox.take(later_ns())
    other.join()
    assert got == [0, 1, 2] and mailbox.take(0) == []


def test_messages_come_to_the_mailbox_alone(mesh: Mesh) -> None:
    """The thread that polls the engine does not wake up. Messages from before the mailbox listened are in it."""
    a, b = mesh.engines
    mailbox = Mailbox()
    b.open_channel(CHANNEL, mailbox.fileno())
    mailbox.put("first")
    send(a, peer_id(1), CHANNEL, b"early")
    assert mailbox.take(later_ns()) == ["first"]
    mailbox.listen(b, CHANNEL)
    assert list(map(text_of, mailbox.take(later_ns()))) == [b"early"]
    send(a, peer_id(1), CHANNEL, b"late")
    assert list(map(text_of, mailbox.take(later_ns()))) == [b"late"]
    assert b.poll() == []


def test_messages_precede_what_is_put_there_after_them(mesh: Mesh) -> None:
    """The engine reports the loss of a link to another thread. It comes after the messages of that link."""
    a, b = mesh.engines
    mailbox, woken = Mailbox(), Mailbox()
    b.open_channel(CHANNEL, mailbox.fileno())
    b.open_channel(CHANNEL + 1, woken.fileno())
    woken.listen(b, CHANNEL + 1)
    mailbox.listen(b, CHANNEL)
    a.open_channel(CHANNEL + 1)
    send(a, peer_id(1), CHANNEL, b"one")
    send(a, peer_id(1), CHANNEL + 1, b"two")
    assert len(woken.take(later_ns())) == 1, "over one connection, in order"
    mailbox.put("lost")
    one, lost = mailbox.take(later_ns())
    assert (text_of(one), lost) == (b"one", "lost")


def test_room_is_told_to_the_mailbox_that_found_none(mesh: Mesh) -> None:
    b, a = mesh.engines
    a_box = Mailbox()
    a.open_channel(CHANNEL, a_box.fileno())
    a_box.listen(a, CHANNEL)
    b.close_channel(CHANNEL)
    b.open_channel(CHANNEL + 1)
    a.open_channel(CHANNEL + 2)
    assert a.post_message(peer_id(0), CHANNEL + 2, b"", bytes(1000), 1500), "the other end has no such channel yet"
    assert not a.post_message(peer_id(0), CHANNEL, b"", bytes(1000), 1500)
    b.open_channel(CHANNEL + 2)
    assert a_box.take(later_ns()) == [Writable(CHANNEL)]
    assert a.poll() == []


def test_a_mailbox_outlives_its_channel_and_its_engine(mesh: Mesh) -> None:
    """S4: a closed channel delivers nothing more; the thread still hears of the end."""
    a, b = mesh.engines
    mailbox = Mailbox()
    for channel in (CHANNEL, CHANNEL + 1):
        b.open_channel(channel, mailbox.fileno())
        mailbox.listen(b, channel)
    send(a, peer_id(1), CHANNEL, b"unread")
    b.close_channel(CHANNEL)
    mailbox.put("closed")
    assert mailbox.take(later_ns()) == ["closed"]
    b.close()
    mailbox.put("end")
    assert mailbox.take(later_ns()) == ["end"]


def test_a_mailbox_without_a_descriptor_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end does not raise a second error."""

    def no_descriptors(*_: object) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(os, "eventfd", no_descriptors)
    with pytest.raises(InternalError, match="too many"):
        Mailbox()
    gc.collect()


def test_the_bytes_that_a_link_has_brought(mesh: Mesh) -> None:
    a, b = mesh.engines
    mailbox = Mailbox()
    assert mailbox.link_bytes(peer_id(0)) == 0, "no engine"
    b.open_channel(CHANNEL, mailbox.fileno())
    mailbox.listen(b, CHANNEL)
    before = mailbox.link_bytes(peer_id(0))
    send(a, peer_id(1), CHANNEL, bytes(1000))
    mailbox.take(later_ns())
    assert mailbox.link_bytes(peer_id(0)) >= before + 1000
    assert mailbox.link_bytes(peer_id(7)) == 0, "no link"
