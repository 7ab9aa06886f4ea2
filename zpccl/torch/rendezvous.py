"""How the ranks of a process group meet: one master, one communicator for each rank, and the peer id of each rank.

Rank 0 writes the address of the master into torch's store. For the default group this is ZPCCL_MASTER, if it is in the
environment of rank 0; otherwise a master that rank 0 starts in its own process. A group made by `new_group` always
starts its own master: a run admits peers only if all its members call, and those of the default group do not.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zpccl import limits
from zpccl.communicator import Communicator
from zpccl.control.addresses import addresses_of, format_address, is_loopback, source_towards
from zpccl.errors import InvalidUsage, OperationTimeout, PCCLError, PeerLost
from zpccl.master_node import MasterNode
from zpccl.state.workers import start_thread

STRAGGLER_TIMEOUT_MIN = limits.STRAGGLER_TIMEOUT_MIN_NS / limits.SECOND
STRAGGLER_TIMEOUT_MAX = limits.GIVEN_TIME_MAX_NS / limits.SECOND


@dataclass(frozen=True)
class Membership:
    """Fixed ranks, and their peers.

    Attributes:
        rank: rank of this process.
        size: number of ranks.
        communicator: communicator of this rank; None if it is the only one.
        ranks: the rank of each row of an all-gather; rows are in order of peer ids.
        master: the master of all ranks, if it is in this process.
        store: the store of these ranks from this meeting on; in it a rank tells the others that it leaves.
        peer_ids: the peer id of each rank, unless it is the only one.
    """

    rank: int
    size: int
    communicator: Communicator | None
    ranks: tuple[int, ...]
    master: MasterNode | None
    store: Any
    peer_ids: tuple[str, ...] = ()

    def leave(self, *, is_orderly: bool) -> None:
        """Leaves the run. A master in this process goes on until all members have left, TORCH_LEAVE_TIMEOUT at most."""
        members: tuple[str, ...] = ()
        if self.communicator is not None:
            members = self.communicator.peer_ids  # A lost rank is none any more.
            self.communicator.close()
        _within_leave_timeout(lambda: self._tell_others(members if is_orderly else ()))
        if self.master is not None:
            self.master.interrupt()

    def _tell_others(self, members: tuple[str, ...]) -> None:
        with contextlib.suppress(RuntimeError):  # The store ends with its host.
            self.store.set(f"left/{self.rank}", "")
            if self.master is not None and members:
                left = [f"left/{rank}" for rank, peer_id in enumerate(self.peer_ids) if peer_id in members]
                self.store.wait(left, timedelta(microseconds=limits.TORCH_LEAVE_TIMEOUT_NS // 1000))


def meet(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    *,
    is_default: bool,
    check: Callable[[], object] | None = None,
) -> Membership:
    """Waits until all ranks are members of one run.

    Args:
        store: a store of this group alone, shared by its ranks. They may meet in it again once they have left.
        rank: rank of this process in the group.
        size: number of ranks of the group.
        timeout: for the whole meeting.
        is_default: True for the group that `init_process_group` makes.
        check: called again and again while ranks are missing; gives up by an exception.

    Raises:
        OperationTimeout: not all ranks came in time.
        PeerLost: a rank was lost while others were admitted, or the store no longer answers. If a rank is lost later,
            the first collective fails.
        InvalidUsage: the master coordinates other peers already.
        PCCLError: other errors, as in `Communicator.connect`.
    """
    if size == 1:
        return Membership(rank, size, None, (0,), None, store)
    deadline = time.monotonic() + timeout.total_seconds()
    master = communicator = None
    try:
        if rank == 0:
            master = _publish_master(store, timeout, is_default)
        _arrive(store, rank, size, timeout, check)
        address = store.get("master").decode()
        is_embedded = store.get("master_is_embedded") == b"1"
        wait_ns = limits.TORCH_MASTER_TIMEOUT_NS if is_embedded else limits.MASTER_TIMEOUT_NS
        job = store.get("job").decode()
        name, wait = f"rank {rank} of {job}", wait_ns / limits.SECOND
        communicator = Communicator(address, name=name, master_timeout=wait, min_world_size=size)
        with _given_up_at(deadline, communicator, size):
            communicator.connect()
            _admit_all(communicator, size, job, deadline)
        _withdraw(store, rank)
        own = dist.PrefixStore(job, store)
        ids = _exchange_ids(own, communicator, rank, size)
    except BaseException as error:
        try:
            _within_leave_timeout(lambda: _withdraw(store, rank, has_met=False))
        finally:
            if communicator is not None:
                communicator.close()
            if master is not None:
                master.interrupt()
        if isinstance(error, RuntimeError) and not isinstance(error, PCCLError):  # An error of torch's store.
            raise PeerLost(f"the store of the process group does not answer: {error}") from error
        raise
    ranks = tuple(ids.index(peer_id) for peer_id in sorted(ids))  # In the order of `Communicator.peer_ids`.
    return Membership(rank, size, communicator, ranks, master, own, tuple(ids))


def claimed(store: Any, who: str) -> Any:
    """The store, if `who` has not met others in it before: old entries would mislead the present ranks.

    Raises:
        InvalidUsage: `who` has met others in it before.
    """
    if store.add(f"came/{who}", 1) > 1:
        raise InvalidUsage("this number is already used: the same ranks have met, or tried to meet, with it")
    return store


def _publish_master(store: Any, timeout: timedelta, is_default: bool) -> MasterNode | None:
    """Writes the address of the master into the store. Starts a master unless ZPCCL_MASTER names one."""
    given = os.environ.get("ZPCCL_MASTER") if is_default else None
    store.set("job", secrets.token_hex(4))
    store.set("master_is_embedded", "0" if given else "1")
    if given:
        store.set("master", given)
        return None
    host = own_host(store, is_default=is_default)
    # No peer of an earlier master can come. A rank that never calls is removed as a straggler, so others do not hang.
    master = MasterNode(
        format_address(loopback_or_all(host) or _all_interfaces(host), 0),
        recovery_grace=0,
        straggler_timeout=min(max(timeout.total_seconds(), STRAGGLER_TIMEOUT_MIN), STRAGGLER_TIMEOUT_MAX),
        daemon=True,
    )
    master.run()
    port = master.address.rpartition(":")[2]
    store.set("master", format_address(host, int(port)))
    return master


def own_host(store: Any, *, is_default: bool) -> str:
    """The address at which other ranks reach this host. For rank 0 of the default group it is MASTER_ADDR.

    For others it is the address from which they send to MASTER_ADDR, or without it to the host of the store. If that is
    this host, /etc/hosts may lead its name to a loopback address, which is no use to others; the name is.
    """
    known = os.environ.get("MASTER_ADDR")
    if known and is_default:
        return known
    known = known or _host_of(store)
    # The port does not matter: nothing is sent.
    source = source_towards(format_address(known or socket.gethostname(), limits.MASTER_PORT)) or "127.0.0.1"
    return known if known and is_loopback(source) else source


def _host_of(store: Any) -> str:
    """The host of a TCPStore; "" for other stores."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def loopback_or_all(host: str) -> str:
    """The address to listen on for connections to `host`: the same if it is a loopback address, else all ("").

    Other names are not looked up: /etc/hosts often leads the name of this host to a loopback address.
    """
    if not is_loopback(host):
        return ""
    return "127.0.0.1" if host == "localhost" else host


def _all_interfaces(host: str) -> str:
    """The address to listen on for connections to any address of `host`."""
    return "0.0.0.0" if any(":" not in address for address in addresses_of(host)) else "::"


def _arrive(store: Any, rank: int, size: int, timeout: timedelta, check: Callable[[], object] | None) -> None:
    """Waits until all ranks are here, so that none polls the master for a rank that has not come yet."""
    store.set(f"here/{rank}", "")
    keys, deadline = [f"here/{other}" for other in range(size)], time.monotonic() + timeout.total_seconds()
    while check is not None and time.monotonic() < deadline and not store.check(keys):
        check()
        time.sleep(limits.TORCH_ARRIVAL_INTERVAL_NS / limits.SECOND)
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except dist.DistNetworkError:
        raise  # The store has ended.
    except RuntimeError as error:
        raise OperationTimeout(f"not all of {size} ranks have called within {timeout}: {error}") from error


def _withdraw(store: Any, rank: int, *, has_met: bool = True) -> None:
    """Removes this rank's entries from the store: ranks that meet in it later must not take them for new ones.

    Once the ranks are members of one run, all have read the entries. Each rank removes its own before it writes its
    peer id, so none can meet again before all are removed. `has_met` False: others may still need the master's address.
    """
    keys = [f"here/{rank}"]
    if rank == 0 and has_met:
        keys += ["master", "master_is_embedded", "job"]
    for key in keys:
        with contextlib.suppress(RuntimeError):  # The store is gone, or cannot delete keys.
            store.delete_key(key)


def _within_leave_timeout(function: Callable[[], object]) -> None:
    """Runs a function that uses the store. If the store's host is silent, torch waits for its answer without end.

    So a thread waits for it, TORCH_LEAVE_TIMEOUT at most. A later use of the store has to wait for this thread.
    """
    thread = threading.Thread(target=function, name="zpccl-leave", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # No thread can be started.
        function()
        return
    # A wait of the store ends first: a thread that is in C++ as Python ends can abort the process.
    thread.join(limits.TORCH_LEAVE_TIMEOUT_NS / limits.SECOND + 1)


@contextlib.contextmanager
def _given_up_at(deadline: float, communicator: Communicator, size: int) -> Iterator[None]:
    """Closes the communicator if the meeting takes too long: members that do not admit it keep `connect` waiting.

    Ranks that have come at the last moment still get as long as a master may take to answer.
    """
    counts: list[int] = []  # The members when it was too late.

    def give_up() -> None:
        counts.append(communicator.world_size)
        communicator.close()

    def too_late() -> OperationTimeout:
        if counts[0]:
            return OperationTimeout(f"only {counts[0]} of {size} ranks have joined in time")
        text = "the members of the run have not admitted this rank in time; give each job a master of its own"
        return OperationTimeout(text)

    left = max(deadline - time.monotonic(), limits.TORCH_MASTER_TIMEOUT_NS / limits.SECOND)
    timer = threading.Timer(left, give_up)
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    except PCCLError as error:
        if counts:
            raise too_late() from error
        raise
    finally:
        timer.cancel()
    timer.join()
    if counts:  # The last rank came at the same moment.
        raise too_late()


def _admit_all(communicator: Communicator, size: int, job: str, deadline: float) -> None:
    """Admits others until all ranks are there. The name of each rank ends with the name of the job."""
    while True:
        strangers = [name for name in communicator.members if not name.endswith(f" of {job}")]
        if strangers:
            raise InvalidUsage(f"the master has other peers, {strangers[:3]}; give each job a master of its own")
        if communicator.world_size >= size:
            return
        if communicator.are_peers_pending():
            communicator.update_topology()
        elif time.monotonic() > deadline:
            raise OperationTimeout(f"only {communicator.world_size} of {size} ranks have joined in time")
        else:
            time.sleep(limits.TORCH_JOIN_INTERVAL_NS / limits.SECOND)


def _exchange_ids(store: Any, communicator: Communicator, rank: int, size: int) -> list[str]:
    """The peer ids of all ranks, by rank. Other ranks may leave once they have them, even before this rank has them."""
    store.set(f"peer/{rank}", communicator.peer_id)
    return [store.get(f"peer/{other}").decode() for other in range(size)]
