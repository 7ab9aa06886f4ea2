"""The public API: one `Communicator` a process and peer group.

A communicator may be used from several threads. Blocking calls release the GIL while they wait, and Ctrl-C ends them:
the peer first withdraws the call from the run, so that no thread touches the caller's memory afterwards. If no master
decides the call in time, it ends anyway, and the peer stays a member. A new call with the same tag, or one that may not
run at the same time, may then have to wait until a master has decided the old one.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from zpccl import limits
from zpccl.arguments import all_reduce
from zpccl.caller import checked_int, checked_nanoseconds, checked_seconds, is_member, is_number, wait
from zpccl.collectives import AsyncReduceHandle, Collectives
from zpccl.control.addresses import (
    advertised_address,
    listen_locally,
    listen_on_first_free,
    parse_listen,
    parse_masters,
)
from zpccl.control.calls import PendingCall
from zpccl.control.descriptors import check_descriptors
from zpccl.control.encryption import ciphers_to_offer
from zpccl.control.keys import peer_keys
from zpccl.control.peer_loop import PeerLoop
from zpccl.control.switches import read_switch
from zpccl.engine.living import Living
from zpccl.errors import InvalidArgument, InvalidUsage, MasterUnreachable, TooFewPeers, public
from zpccl.measuring import Prober, measure_paths
from zpccl.progress import ProgressCallback, ProgressReporter, check_callback
from zpccl.protocol.identity import SALT_BYTES, make_peer_id
from zpccl.protocol.messages import PathSample, StateEntry, SyncSpec, TopologyKind, TopologySpec
from zpccl.protocol.peer import PeerOptions, State
from zpccl.shared_state import SharedState
from zpccl.state.offers import Offer
from zpccl.state.regions import Region
from zpccl.state.serving import TokenBucket
from zpccl.state.transfer import StateTransfer
from zpccl.topology import Topology
from zpccl.types import Attribute, ReduceOp, SharedStateSyncInfo, SharedStateSyncStrategy

__all__ = ["AsyncReduceHandle", "Communicator"]

_loops: Living[PeerLoop] = Living()
os.register_at_fork(after_in_child=_loops.clear)  # The runs belong to the parent.


@atexit.register
def _leave_at_exit() -> None:
    """Programs that end without close() leave gracefully too."""
    for loop in _loops.all():
        loop.offers.withdraw()
        loop.close()


class Communicator(Collectives):
    """Takes part in a run.

    Args:
        address: address of the master, "host:port"; ZPCCL_MASTER if left out. A list, "a:48148,b:48148", adds standbys:
            the first master leads; when it is gone, a quorum of the members moves to another. All peers pass the same
            list.
        peer_group: peers of one group reduce and share state among themselves; 0 to 2**32 - 1.
        p2p_connection_pool_size: the same as `connections`.
        connections: TCP connections to each other peer, 1 to 128 (ZPCCL_CONNECTIONS). 0 or left out: 4 to a near peer.
            To a far peer: 16 if this host's congestion control is BBR, otherwise 64, and up to 128 when packet losses
            turn out to limit these. The peer that dials decides, which is mostly the one that joined later.
        advertise: "host" or "host:port" where others reach this peer, in addition to the addresses of its interfaces
            (ZPCCL_ADVERTISE).
        listen: "host", "host:port" or "host:first-last" to listen on for other peers; without a host, on all interfaces
            (ZPCCL_LISTEN).
        name: name of this peer in logs and errors; "hostname:pid" if left out (ZPCCL_NAME).
        heartbeat_timeout: seconds of silence after which the peer treats the master as unreachable.
        master_timeout: seconds that calls wait for an unreachable master.
        secret: text from `zpccl keygen`: the secret of the run, or this peer's private key (ZPCCL_SECRET, or the file
            that ZPCCL_SECRET_FILE names). If left out, the master must have no secret either.
        master_key: public key of the master, if `secret` is a private key (ZPCCL_MASTER_KEY).
        encrypt: whether tensors and state travel encrypted (ZPCCL_ENCRYPT: 1 or 0), the same for all peers of a run.
            True needs a secret and PyNaCl (the extra `secure`). False: connections are only authenticated. Left out:
            True if there is a secret.
        upload_limit: limit, in bytes per second, on the shared state that this peer sends; 1 MiB or more
            (ZPCCL_UPLOAD_LIMIT). It leaves bandwidth for training while newcomers fetch state. Left out: no limit.
        host_size: number of peers of this host that join and leave together: connect() returns when all have called it
            and the members have admitted all of them. When one is lost or leaves, the master removes the others. A peer
            that waits ten minutes for others of its host raises `HostIncomplete`. Use it if the processes of a host
            depend on each other, each in its own peer group. 0 or 1: this peer joins and leaves alone.
        host: name of the host of the `host_size` peers; the hostname if left out.
        min_world_size: collectives among fewer members fail with `TooFewPeers` and change nothing. The same for all
            peers of a group. 0 or left out: two members are enough. It does not apply to the shared state.
        local_sockets: whether peers on one host, in the same network namespace, use Unix-domain sockets and shared
            memory between them, which cost less than TCP (ZPCCL_LOCAL_SOCKETS: 1 or 0). Left out: True.

    Raises:
        InvalidArgument: an argument is never valid; or `encrypt=True` without a secret; or a secret without PyNaCl and
            without `encrypt=False`.
    """

    @public
    def __init__(
        self,
        address: str | None = None,
        peer_group: int = 0,
        p2p_connection_pool_size: int = 0,
        *,
        connections: int | None = None,
        advertise: str | None = None,
        listen: str | None = None,
        name: str | None = None,
        heartbeat_timeout: float = limits.HEARTBEAT_TIMEOUT_NS / limits.SECOND,
        master_timeout: float = limits.MASTER_TIMEOUT_NS / limits.SECOND,
        secret: str | None = None,
        master_key: str | None = None,
        encrypt: bool | None = None,
        upload_limit: float | None = None,
        host_size: int = 0,
        host: str | None = None,
        min_world_size: int = 0,
        local_sockets: bool | None = None,
    ) -> None:
        self._lock = threading.RLock()  # A signal handler may close it meanwhile, in the same thread.
        self._loop: PeerLoop | None = None
        self._is_closed = False
        self._on_progress: ProgressCallback | None = None
        self._pid = os.getpid()
        self._keys = peer_keys(secret, master_key)
        self._ciphers = ciphers_to_offer(encrypt, has_secret=self._keys is not None)
        text = address or os.environ.get("ZPCCL_MASTER") or f"127.0.0.1:{limits.MASTER_PORT}"
        self._masters = parse_masters(text)
        self._group = checked_int(peer_group, "peer_group", 0, limits.PEER_GROUP_MAX)
        self._min_world_size = checked_int(min_world_size, "min_world_size", 0, limits.PEERS_MAX)
        count, source = connections or p2p_connection_pool_size, "connections"
        if not count:
            count, source = _environment_int("ZPCCL_CONNECTIONS"), "ZPCCL_CONNECTIONS"
        self._connections = checked_int(count, source, 0, limits.LINK_CONNECTIONS_MAX)
        self._advertise = advertise or os.environ.get("ZPCCL_ADVERTISE")
        if self._advertise:
            advertised_address(self._advertise, limits.PEER_PORT_FIRST)
        self._listen = parse_listen(listen or os.environ.get("ZPCCL_LISTEN"))
        self._name = _plain(name or os.environ.get("ZPCCL_NAME") or f"{socket.gethostname()}:{os.getpid()}", "name")
        size = checked_int(host_size, "host_size", 0, limits.HOST_PEERS_MAX)
        self._host = (_plain(host or socket.gethostname(), "host"), size) if size > 1 else ("", 0)
        self._heartbeat_timeout_ns = checked_nanoseconds(
            heartbeat_timeout, "heartbeat_timeout", limits.HEARTBEAT_TIMEOUT_MIN_NS
        )
        self._master_timeout_ns = checked_nanoseconds(master_timeout, "master_timeout")
        self._upload = _upload_bucket(upload_limit)
        self._local_sockets, _ = read_switch(local_sockets, "local_sockets")

    def __enter__(self) -> Communicator:
        """Connects, unless this peer is connected already."""
        if self._loop is None or self._is_closed or self._loop.view.state is State.CLOSED:
            self.connect()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leaves the run."""
        self.close()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and os.getpid() == self._pid:
            loop.drop()

    def __reduce__(self) -> str:
        raise InvalidUsage(
            "a communicator belongs to one process, and cannot be pickled or copied; make one in each process"
        )

    # --- Taking part ------------------------------------------------------------------------------------------------

    @public
    def connect(
        self,
        n_attempts: int = 5,
        *,
        prefetch: SharedState | None = None,
        prefetch_timeout: float = limits.PREFETCH_TIMEOUT_NS / limits.SECOND,
    ) -> None:
        """Registers with the master and waits until the members admit this peer.

        The master admits the first peer of a run at once, and later peers when all members call `update_topology`.

        Args:
            n_attempts: tries to reach each master, with growing pauses. If nobody listens there, 5 tries take 1.5 s,
                and each try beyond 10 takes 0.6 s. If a connection is not answered, each try takes 3 s, or 6 s
                for a host name, which is tried with one IPv6 and one IPv4 address.
            prefetch: a state to fetch before admission, from the members that offer it (`offer_state`), while they go
                on. It is verified and gets the revision of the offer. Meanwhile the members neither wait for this peer
                nor hear of it. If nobody offers a state, or not in time, `prefetch` stays as it is (except perhaps
                tensors with `allow_content_inequality`), and the next `sync_shared_state` fetches everything. Call that
                sync in any case: it fetches what has changed since.
            prefetch_timeout: seconds after which the prefetch is given up.

        Raises:
            MasterUnreachable: no master of this version answers at the address.
            AuthenticationFailed: the secret or key is not that of the run, or only one side has one.
            PeerUnreachable: this peer could make no data connection to a member.
            InvalidUsage: connected already, or closed.
            InternalError: the system has no thread to give, or not enough descriptors.
        """
        n_attempts = checked_int(n_attempts, "n_attempts", 1)
        if prefetch is not None and not isinstance(prefetch, SharedState):
            raise InvalidArgument(f"prefetch is a {type(prefetch).__name__}, not a SharedState")
        deadline_ns = time.monotonic_ns() + checked_nanoseconds(prefetch_timeout, "prefetch_timeout")
        regions = prefetch.regions() if prefetch is not None else {}
        call = PendingCall()
        loop: PeerLoop | None = None
        try:
            with self._lock:
                self._check_process()
                if self._is_closed:
                    raise InvalidUsage("the communicator is closed; make a new one")
                if self._loop is not None:
                    if self._loop.view.state is not State.CLOSED:
                        raise InvalidUsage("connected already")
                    self._loop.close()  # Waits until the loop has ended, so that its port is free.
                for dropped in [each for each in _loops.all() if each.is_dropped]:  # The same for these.
                    dropped.close(timeout_ns=limits.PEER_LOOP_TIMEOUT_NS)  # After a timeout its port may not be free.
                loop = self._loop = self._make_loop(is_ready=prefetch is None)
                if self._is_closed:
                    raise InvalidUsage("the communicator was closed meanwhile")
            with self._giving_up(loop, [call]):
                if prefetch is None:
                    loop.start(call, n_attempts)
                else:
                    self._fetch_ahead(loop, call, n_attempts, prefetch, regions, deadline_ns)
                self._answer(loop, call)
        except BaseException:
            if loop is not None:
                loop.abandon()  # Ctrl-C came before the loop's thread began: the next connect() makes a new loop.
            raise

    def _fetch_ahead(
        self,
        loop: PeerLoop,
        call: PendingCall,
        n_attempts: int,
        state: SharedState,
        regions: Mapping[str, Region],
        deadline_ns: int,
    ) -> None:
        """Connects, and fetches what members offer until all of it is here, or until the connect call has ended."""
        reporter = ProgressReporter("prefetch", self._on_progress)
        prefetch = loop.offers.make_prefetch(
            regions, _free_keys(state), state.digest_kind, deadline_ns, reporter.update
        )
        call.future.add_done_callback(lambda _: prefetch.stop())
        try:
            loop.start(call, n_attempts)
            if prefetch.run() is not None:
                reporter.end()
        finally:
            if prefetch.revision is not None:  # The tensors have been written, even if an interrupt came after that.
                state.revision = prefetch.revision
            loop.offers.end_prefetch()
            loop.be_ready()

    def _make_loop(self, *, is_ready: bool = True) -> PeerLoop:
        identity = self._keys.identity if self._keys is not None else ""
        peer_id, token = make_peer_id(identity, secrets.token_bytes(SALT_BYTES)), secrets.token_bytes(16)
        options = PeerOptions(
            peer_id=peer_id,
            token=token,
            name=self._name,
            group=self._group,
            masters=self._masters,
            is_ready=is_ready,
            host=self._host[0],
            host_size=self._host[1],
            master_timeout_ns=self._master_timeout_ns,
        )
        check_descriptors()
        with contextlib.ExitStack() as on_failure:  # A kept exception would keep the sockets open.
            listener = on_failure.enter_context(listen_on_first_free(*self._listen))
            local_listener = None if self._local_sockets is False else listen_locally(peer_id)
            if local_listener is not None:
                on_failure.enter_context(local_listener)
            loop = PeerLoop(
                options,
                tuple(f"tcp://{address}" for address in self._masters),
                listener,
                self._connections,
                self._advertise,
                self._heartbeat_timeout_ns,
                self._keys,
                self._ciphers,
                local_listener,
                self._min_world_size,
            )
            on_failure.callback(loop.abandon)
            _loops.add(loop)
            on_failure.pop_all()
        return loop

    @public
    def close(self) -> None:
        """Leaves the run: the others go on without this peer at once. Calls in flight fail. May be called twice.

        If there are several masters and none leads at this moment, it waits for the next one, at most 3 s. A second
        call ends that wait.

        A signal handler may call it. But if handlers of `logging` that the program has made get the log of zpccl, the
        signal may come while this thread holds the lock of one. The thread of this peer then waits for it without end.
        In such a program, raise an exception in the signal handler, and close where it is caught.
        """
        if self._pid != os.getpid():
            return  # The run belongs to the parent.
        with self._lock:
            loop, self._is_closed = self._loop, True
        if loop is not None:
            loop.offers.withdraw()
            loop.close()
            loop.offers.withdraw()  # Another thread may have made an offer meanwhile.

    @property
    def members(self) -> tuple[str, ...]:
        """The names of the members of this peer's group, in ring order."""
        return tuple(name for _, _, name in self._group_members())

    @property
    def rank(self) -> int:
        """This peer's place in the ring of its group, as of the latest member list; -1 if it is in none yet."""
        own = self._loop.options.peer_id if self._loop is not None else b""
        return next((rank for rank, member in enumerate(self._group_members()) if member[0] == own), -1)

    @property
    def peer_id(self) -> str:
        """The unique id of this peer, as in results, in hexadecimal. Empty before `connect`."""
        return self._loop.options.peer_id.hex() if self._loop is not None else ""

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """The `peer_id` of each member of this peer's group, in the order of rows and parts, not in order of ranks."""
        return tuple(sorted(peer_id.hex() for peer_id, _, _ in self._group_members()))

    @property
    def world_size(self) -> int:
        """Members of this peer's group."""
        return len(self._group_members())

    @property
    def epoch(self) -> int:
        """Number of the member list; it grows at every admission and loss, and when the master ends a deadlock."""
        return self._loop.view.epoch if self._loop is not None else 0

    @property
    def min_world_size(self) -> int:
        """The number of members that a collective needs in the group."""
        return max(self._min_world_size, 2)

    @property
    def group(self) -> int:
        """This peer's group."""
        return self._group

    @public
    def get_attribute(self, attribute: Attribute) -> int:
        """A number about the run, as of the latest member list.

        Raises:
            InvalidUsage: not connected.
            InvalidArgument: no such attribute.
        """
        sizes = Counter(group for _, group, _ in self._admitted().view.members)
        if not is_member(attribute, Attribute):
            raise InvalidArgument(f"{attribute!r} is not an Attribute")
        return {
            Attribute.GLOBAL_WORLD_SIZE: sizes.total(),
            Attribute.LOCAL_WORLD_SIZE: sizes[self._group],
            Attribute.NUM_DISTINCT_PEER_GROUPS: len(sizes),
            Attribute.LARGEST_PEER_GROUP_WORLD_SIZE: max(sizes.values(), default=0),
        }[attribute]

    # --- Topology ---------------------------------------------------------------------------------------------------

    @public
    def update_topology(self) -> None:
        """Admits pending peers. All members of all groups must call it.

        Raises:
            PendingAsyncOps: collectives are in flight.
            InvalidUsage: not connected, or other peers made other calls.
        """
        self._run(PendingCall(spec=TopologySpec(TopologyKind.UPDATE)))

    @public
    def are_peers_pending(self) -> bool:
        """True if peers wait for admission. All members of all groups must call it; all get the same answer.

        A peer that has had no data connection to its group for two seconds does not count until it has one.
        Collectives may be in flight meanwhile. A program that goes on after Ctrl-C asks again before its next
        collective, or not at all: others may have the answer, and a later question is for the next round.

        Raises:
            InvalidUsage: not connected, or other peers made other calls.
        """
        return bool(self._run(PendingCall(spec=TopologySpec(TopologyKind.PENDING))))

    @public
    def optimize_topology(self) -> None:
        """Measures paths and hosts, for better plans. All members of all groups must call it.

        Each member sends each other one up to 64 MiB of meaningless bytes, for a second, on as many paths at a time as
        possible; then it does so to all others at once, for three seconds. For N members these are 2 (N - 1) rounds of
        a second, and N of three seconds, at most 16; between two rounds all meet. Members that have called it before do
        not repeat it for a newcomer, and if all paths were measured within the hour, or have carried since what was
        expected, it returns at once. Paths within a host are not measured. If a member is lost, it ends early.

        Collectives on large tensors measure their paths as well, but less exactly. In uneven networks they take a
        third longer without this call.

        Raises:
            PendingAsyncOps: collectives are in flight.
            InvalidUsage: not connected, or other peers made other calls.
        """
        unmeasured = self._run(PendingCall(spec=TopologySpec(TopologyKind.OPTIMIZE)))
        loop = self._admitted()
        members = loop.view.members
        measured = [peer_id for peer_id, _, _ in members[: max(0, len(members) - unmeasured)]]
        peers = [peer_id for peer_id, group, _ in members if group == self._group]
        if unmeasured and len(peers) > 1:
            own = loop.options.peer_id
            prober = Prober(loop.engine, peers.index(own), chooses_senders=not self._connections)
            measure_paths(peers, measured, own, prober.probe, self._meet)

    def _meet(self, round_count: int, measured: tuple[PathSample, ...]) -> None:
        data = np.zeros(round_count + 1, np.uint8)  # With another number of rounds it is another call.
        call = all_reduce(data, data, ReduceOp.MAX, limits.TAG_MAX, None, None, "auto", restore=False)
        call.measured = measured
        self._run(call)

    @public
    def topology(self, timeout: float = limits.TOPOLOGY_TIMEOUT_NS / limits.SECOND) -> Topology:
        """The measured network of this peer's group: rates and round trips of paths, and this peer's links.

        Asks the master, which keeps the measurements from collectives on large tensors. Other members need not call
        it. The result prints as a table.

        Args:
            timeout: seconds to wait for the master.

        Returns:
            Rates in bytes per second, times in seconds; None for an unknown value.

        Raises:
            MasterUnreachable: the master has not answered in time. Other calls that wait for it go on.
            InvalidUsage: not connected.
        """
        seconds, loop = checked_seconds(timeout), self._admitted()
        self._check_thread(loop)
        future = loop.ask_measurements()
        if not wait(future, seconds):
            address = ",".join(self._masters)
            raise MasterUnreachable(f"no master at {address} has answered within {seconds:g} s", address=address)
        error = future.exception()
        if error is not None:
            raise copy.copy(error)
        return Topology.of(future.result(), self._group, loop.link_ends())

    # --- Shared state -----------------------------------------------------------------------------------------------

    @public
    def on_progress(self, callback: ProgressCallback | None) -> None:
        """Sets the callback that reports the progress of fetches of shared state in syncs; None removes it.

        The callback gets a `Progress` at most ten times a second, in the thread that called `sync_shared_state`, which
        waits for it. If it raises an exception, that is logged; the sync goes on without further calls.

        Raises:
            InvalidArgument: neither None nor callable.
        """
        check_callback(callback)
        self._on_progress = callback

    @public
    def sync_shared_state(
        self,
        state: SharedState,
        strategy: SharedStateSyncStrategy = SharedStateSyncStrategy.ENFORCE_POPULAR,
    ) -> SharedStateSyncInfo:
        """Makes the state equal on all members of the group, bit for bit. All of them must call it.

        The contents that most peers hold at the revision of the sync win. A peer that differs or is behind receives
        them, and its `state.revision` is set. A sync that fails changes no tensor and no revision.

        Args:
            state: its tensors are read; those that differ are written.
            strategy: ENFORCE_POPULAR, RECEIVE_ONLY or SEND_ONLY.

        Raises:
            TooFewPeers: alone in the group.
            InvalidArgument: other peers have other keys, dtypes or sizes.
            InvalidUsage: the revision is ahead of the run's, SEND_ONLY peers differ, not connected; or this peer has
                changed a tensor meanwhile, or has not enough memory.
            NoSharedState: no peer can send.
            PeerLost: a peer was lost meanwhile; call again.
            InternalError: the system has no descriptor to give.
        """
        loop = self._admitted()
        self._check_thread(loop)
        if not isinstance(state, SharedState):
            raise InvalidArgument(f"state is a {type(state).__name__}, not a SharedState")
        if not is_member(strategy, SharedStateSyncStrategy):
            raise InvalidArgument(f"{strategy!r} is not a SharedStateSyncStrategy")
        infos = {info.name: info for info in state.tensor_infos}
        tensors = state.regions()
        if len(self._group_members()) <= 1:
            raise TooFewPeers("this peer is alone in its group; there is nobody to share state with")
        kind = state.digest_kind
        reporter = ProgressReporter("fetch", self._on_progress)
        transfer = StateTransfer(
            tensors,
            loop.engine.post_message,
            loop.report_fetch,
            kind,
            loop.options.peer_id,
            upload=self._upload,
            is_local=loop.engine.is_local,
            on_moved=reporter.update,
            may_differ=_free_keys(state),
        )
        entries = tuple(
            StateEntry(
                name, tensor.datatype, tensor.count, bool(infos[name].allow_content_inequality), transfer.digests[name]
            )
            for name, tensor in tensors.items()
        )
        call = PendingCall(spec=SyncSpec(int(strategy), state.revision, entries, kind), transfer=transfer)
        try:
            with self._giving_up(loop, [call]):
                loop.call([call])
                transfer.run()
                state.revision = self._answer(loop, call)
            reporter.end()
        except BaseException:
            if transfer.is_written and call.future.done():  # The sync was committed before the interrupt.
                state.revision = call.future.result()
            raise
        return SharedStateSyncInfo(transfer.tx_bytes, transfer.rx_bytes)

    @public
    def offer_state(self, state: SharedState | None, *, copy: bool = True) -> Offer | None:
        """Offers a state to peers that have not been admitted yet: they fetch it while this peer goes on.

        An offer lasts until `Offer.withdraw` or until the next call, which replaces it: joiners then switch to the new
        offer. So offer the state that the next sync will begin with, at a time when joiners can fetch it before it
        changes again.

        Args:
            state: the state to offer, at its revision. None ends the offer.
            copy: True: the tensors are copied now, and may be written at any time afterwards; the next offer uses the
                memory of the copies again. False: the tensors themselves are offered. Before the program writes one, it
                calls `before_write` of the offer, which copies that tensor. If a tensor is written without this call,
                the offer ends, and an error in the log names the tensor.

        Returns:
            The offer; None if `state` is None.

        Raises:
            InvalidArgument: the state cannot be offered.
            InvalidUsage: not connected.
            InternalError: the system has no memory for the copies, or no thread. Then nothing is offered.
        """
        loop = self._admitted()
        if state is None:
            loop.offers.withdraw()
            return None
        if not isinstance(state, SharedState):
            raise InvalidArgument(f"state is a {type(state).__name__}, not a SharedState")
        kind, free = state.digest_kind, _free_keys(state)
        return loop.offers.offer(state.revision, state.regions(), free, kind, self._upload, copy=copy)


def _free_keys(state: SharedState) -> list[str]:
    """The names of tensors that may differ between peers."""
    return [info.name for info in state.tensor_infos if info.allow_content_inequality]


def _plain(text: Any, argument: str) -> str:
    """A name that every terminal and log can print."""
    if not isinstance(text, str):
        raise InvalidArgument(f"{argument} {text!r} is not a text")
    plain = "".join(letter if letter.isprintable() else "?" for letter in text)
    return plain[: limits.NAME_CHARS_MAX].encode(errors="replace").decode()  # No lone surrogates.


def _upload_bucket(bytes_per_second: Any) -> TokenBucket | None:
    source = "upload_limit"
    if bytes_per_second is None:
        bytes_per_second, source = _environment_int("ZPCCL_UPLOAD_LIMIT") or None, "ZPCCL_UPLOAD_LIMIT"
    if bytes_per_second is None:
        return None
    is_rate = is_number(bytes_per_second) and not isinstance(bytes_per_second, bool)
    if not is_rate or not limits.UPLOAD_LIMIT_MIN_BYTES <= bytes_per_second < float("inf"):
        bound = limits.UPLOAD_LIMIT_MIN_BYTES
        raise InvalidArgument(f"{source} {bytes_per_second!r} is not a number of bytes a second from {bound} on")
    return TokenBucket(int(bytes_per_second))


def _environment_int(name: str) -> int:
    text = os.environ.get(name) or "0"
    if not (text.isascii() and text.isdigit()):
        raise InvalidArgument(f"{name} is {text!r}; give a whole number in decimal digits, without sign or exponent")
    return int(text)
