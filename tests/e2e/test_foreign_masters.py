"""L3: the program at the address of a standby does not speak this protocol. Peers keep using the right master."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zmq

import zpccl
from e2e.harness import until
from zpccl import limits
from zpccl.protocol.messages import MAGIC

pytestmark = pytest.mark.e2e

OTHER_VERSION = MAGIC + bytes([limits.PROTOCOL_VERSION + 1]) + b"what that version says"
ANSWERS = pytest.mark.parametrize("answer", [OTHER_VERSION, b"nonsense", b""], ids=["version", "nonsense", "no bytes"])


@contextlib.contextmanager
def foreign_server(answer: bytes, address: str = "127.0.0.1:*") -> Iterator[str]:
    """A server that speaks ZeroMQ and answers everything with the same bytes. Yields its address."""
    is_over = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"tcp://{address}")
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)

        def serve() -> None:
            while not is_over.is_set():
                if router.poll(20):
                    sender, *_ = router.recv_multipart()
                    router.send_multipart([sender, answer])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield endpoint.removeprefix("tcp://")
        finally:
            is_over.set()
            thread.join()


def join(comm: zpccl.Communicator, size: int) -> None:
    comm.connect()
    while comm.world_size < size:
        comm.update_topology()


@contextlib.contextmanager
def members(addresses: list[str]) -> Iterator[list[zpccl.Communicator]]:
    comms = [zpccl.Communicator(address, name=f"p{i}") for i, address in enumerate(addresses)]
    with ThreadPoolExecutor(len(comms)) as threads:
        try:
            list(threads.map(lambda comm: join(comm, len(comms)), comms))
            yield comms
        finally:
            for comm in comms:
                comm.close()


def sums(comms: list[zpccl.Communicator]) -> set[float]:
    with ThreadPoolExecutor(len(comms)) as threads:
        return set(threads.map(lambda comm: float(comm.all_reduce(np.ones(10, np.float32))[0]), comms))


@ANSWERS
def test_a_newcomer_passes_it_by(answer: bytes) -> None:
    """The standby leads the run. A foreign program has taken the first address in the list."""
    with (
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as first,
        zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05) as standby,
        zpccl.Communicator(f"{first.address},{standby.address}", name="p0") as member,
        contextlib.closing(zpccl.Communicator(f"{first.address},{standby.address}", name="p1")) as newcomer,
    ):
        first.interrupt()
        with foreign_server(answer, first.address), ThreadPoolExecutor(1) as threads:
            joined = threads.submit(newcomer.connect)
            while member.world_size < 2:
                member.update_topology()
            joined.result()
            assert sums([member, newcomer]) == {2.0}


@ANSWERS
def test_members_pass_it_by(answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """The master of the run dies. The log names the foreign standby. The master comes back, and no call fails."""
    caplog.set_level(logging.WARNING, "zpccl.peer")
    master = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05)
    standby = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05)
    master.run()
    standby.run()
    try:
        with members([f"{master.address},{standby.address}"] * 3) as comms, ThreadPoolExecutor(1) as threads:
            standby.interrupt()
            with foreign_server(answer, standby.address):
                master.interrupt()
                call = threads.submit(sums, comms)
                until(lambda: caplog.text.count(f"{standby.address}: ") >= 3, "all to look at the standby")
                master = zpccl.MasterNode(master.address, recovery_grace=0.05)
                master.run()
                assert call.result() == {3.0}
    finally:
        master.interrupt()
        standby.interrupt()


def test_the_only_master_is_replaced_by_mistake(caplog: pytest.LogCaptureFixture) -> None:
    """Members wait for the right master."""
    master = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.05)
    master.run()
    try:
        with members([master.address] * 2) as comms, ThreadPoolExecutor(1) as threads:
            master.interrupt()
            with foreign_server(OTHER_VERSION, master.address):
                call = threads.submit(sums, comms)
                until(lambda: f"{master.address}: " in caplog.text, "a look")
            master = zpccl.MasterNode(master.address, recovery_grace=0.05)
            master.run()
            assert call.result() == {2.0}
    finally:
        master.interrupt()


def test_a_newcomer_finds_another_version_only() -> None:
    with foreign_server(OTHER_VERSION) as one, foreign_server(OTHER_VERSION) as other:
        for address in (one, f"{one},{other}"):
            comm = zpccl.Communicator(address)
            with pytest.raises(zpccl.VersionMismatch):
                comm.connect()
