"""Messages that are posted without waiting, and bodies that are lent."""

from __future__ import annotations

import errno
import threading

import pytest
from engine_mesh import WAIT_S, Mesh, peer_id, send, until, wait_events

from zpccl.engine.engine import FREE_CHANNEL, EngineError, MessageReceived, Writable


def test_a_message_in_two_parts_and_the_room_for_the_next() -> None:
    """Posting never waits: it says that there is no room, and an event says when there is."""
    mesh = Mesh(2, connections=1)
    a, b = mesh.engines
    a.open_channel(3)
    assert a.post_message(peer_id(1), 3, b"head", memoryview(bytearray(1000)), 1500)
    assert not a.post_message(peer_id(1), 3, b"", bytes(1000), 1500)
    assert a.link_state(peer_id(1)).message_bytes == 1004
    b.open_channel(3)
    (event,) = wait_events(b, 1)
    assert isinstance(event, MessageReceived) and event.body.read() == b"head" + bytes(1000)
    (room,) = wait_events(a, 1)
    assert room == Writable(3)
    assert a.post_message(peer_id(1), 3, b"", b"next", 1500)
    with pytest.raises(EngineError) as error:
        a.post_message(peer_id(5), 3, b"", b"", 1500)
    assert error.value.errno == errno.ENOTCONN
    a.close_channel(3)
    with pytest.raises(EngineError) as error:
        a.post_message(peer_id(1), 3, b"", b"", 1500)
    assert error.value.errno == errno.ECANCELED
    mesh.close()


def test_a_body_is_lent_until_it_is_released_or_the_engine_closed() -> None:
    """S4: nobody reads memory that the engine has freed."""
    mesh = Mesh(2, connections=1)
    a, b = mesh.engines
    for engine in mesh.engines:
        engine.open_channel(3)
    for text in (b"one", b"two", b"three"):
        send(a, peer_id(1), 3, text)
    one, two, three = (event.body for event in wait_events(b, 3) if isinstance(event, MessageReceived))
    with one.open() as view:
        assert bytes(view) == b"one" and len(one) == 3 and view.readonly
    one.release()
    one.release()
    with two.open() as view:
        closing = threading.Thread(target=b.close)
        closing.start()
        assert bytes(view) == b"two", "the engine waits for its readers"
    closing.join(WAIT_S)
    assert not closing.is_alive()
    with pytest.raises(EngineError) as error, three.open():
        pass
    assert error.value.errno == errno.ESHUTDOWN
    two.release()
    three.release()
    mesh.close()


def test_free_channels_are_outside_the_order() -> None:
    """What comes before one is open is dropped, and what belongs to a later attempt still waits for it."""
    mesh = Mesh(2, connections=1)
    a, b = mesh.engines
    for channel_id in (FREE_CHANNEL, 3):
        a.open_channel(channel_id)
    b.open_channel(FREE_CHANNEL + 1)
    send(a, peer_id(1), FREE_CHANNEL, b"dropped")
    send(a, peer_id(1), 3, b"waits")
    until(lambda: sum(b.link_stats(peer_id(0))[1]) >= 40 + len(b"dropped"))
    b.open_channel(FREE_CHANNEL)
    b.open_channel(3)
    (event,) = wait_events(b, 1)
    assert isinstance(event, MessageReceived) and (event.channel_id, event.body.read()) == (3, b"waits")
    mesh.close()
