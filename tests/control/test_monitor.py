"""Events of socket monitors."""

from __future__ import annotations

import enum
import gc
import os
import socket

import pytest
import zmq

import zpccl
from zpccl.control.monitor import take_event

WAIT_MS = 10_000


def test_an_event_has_its_kind_and_its_value() -> None:
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        router.get_monitor_socket(zmq.EVENT_ACCEPTED) as monitor,
    ):
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(zmq.Again):
            take_event(monitor)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            assert monitor.poll(WAIT_MS)
            kind, descriptor = take_event(monitor)
            with socket.socket(fileno=os.dup(descriptor)) as accepted:
                assert (kind, accepted.getpeername()) == (zmq.EVENT_ACCEPTED, connection.getsockname())
        router.disable_monitor()


def members() -> int:
    """Enum members of pyzmq, which live for ever."""
    gc.collect()
    return sum(isinstance(one, enum.Enum) and type(one).__module__.startswith("zmq") for one in gc.get_objects())


def test_failed_dials_leave_nothing_behind() -> None:
    """B1: the value of such an event is random, so that an enum member of each one would add up."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = "{}:{}".format(*nobody.getsockname())
    before = 0
    for _ in range(3):
        with pytest.raises(zpccl.MasterUnreachable):
            zpccl.Communicator(address, listen="127.0.0.1").connect(2)
        before = before or members()  # The events that a monitor is asked for make some, once.
    assert members() == before
