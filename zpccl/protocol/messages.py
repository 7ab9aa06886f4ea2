"""The control messages between peers and master, and their encoding.

A message on the wire is one ZeroMQ frame: MAGIC, one byte of protocol version, then a MessagePack array that begins
with the name of the message. Peers number their calls, and every message about a call carries its `call_id`, so a
duplicate does no harm. Attempt ids increase and never repeat within a run.

Peers send `PeerMessage`, the master sends `MasterMessage`. Messages compare by value.
"""

from __future__ import annotations

import enum
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Annotated, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from zpccl import limits
from zpccl.errors import ProtocolViolation, Result
from zpccl.types import Algorithm

MAGIC = b"zp"

PeerId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Token: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Term: TypeAlias = Annotated[int, Meta(ge=0, le=limits.TERM_MAX)]
Name: TypeAlias = Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
PlainName: TypeAlias = Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX)]
"""A name in a message that may have millions: a pattern takes a microsecond each. Logs and errors escape it."""
Text: TypeAlias = Annotated[str, Meta(max_length=limits.TEXT_CHARS_MAX)]
Address: TypeAlias = Annotated[str, Meta(max_length=limits.ADDRESS_CHARS_MAX, pattern=r"\A[\x21-\x7e]*\Z")]
Addresses: TypeAlias = Annotated[tuple[Address, ...], Meta(max_length=limits.ADDRESSES_PER_PEER_MAX)]
PeerIds: TypeAlias = Annotated[tuple[PeerId, ...], Meta(max_length=limits.PEERS_MAX)]
LinkKey: TypeAlias = Annotated[bytes, Meta(max_length=32)]
Values: TypeAlias = Annotated[
    tuple[Annotated[str, Meta(max_length=limits.MISMATCH_VALUE_BYTES_MAX)], ...],
    Meta(max_length=limits.MISMATCH_VALUES_MAX),
]
CallIds: TypeAlias = Annotated[tuple[Natural, ...], Meta(max_length=limits.PEERS_MAX)]
PlansAhead: TypeAlias = Annotated[tuple[Natural, ...], Meta(max_length=limits.PLANS_AHEAD_AT_TAG_MAX)]
"""Attempts that the receiver may start ahead of a plan, the next one first."""
PlannedAlgorithm: TypeAlias = Annotated[int, Meta(ge=1, le=4)]
"""A value of `Algorithm` other than AUTO."""
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=limits.DIRECT_PEERS_MAX)]
"""An index in the order of a plan."""
MemberIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=limits.PEERS_MAX)]
"""An index in Measurements.members."""
Rate: TypeAlias = Annotated[int, Meta(ge=0, le=limits.RATE_TOLD_MAX)]
FrameBytes: TypeAlias = Annotated[int, Meta(ge=1, le=limits.FRAME_BYTES_MAX)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]


NO_ID = bytes(16)
"""Stands for "no run" or "no leader"."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: a tagged MessagePack array."""


# --- From peers to the master ---------------------------------------------------------------------------------------


class Member(_Message, frozen=True):
    """One member of the run."""

    peer_id: PeerId
    group: int
    name: Name
    since: Annotated[int, Meta(ge=0, le=limits.EPOCH_MAX)] = 0
    """The epoch of the list by which it was admitted; 0 where that does not matter."""


def since_of(members: Iterable[Member], peer_id: bytes) -> int:
    """The epoch of the list by which this peer was admitted; 0 if it is not one of the members."""
    return next((member.since for member in members if member.peer_id == peer_id), 0)


class Hello(_Message, tag="hello", frozen=True):
    """Registers a new peer, or claims a registered one on a new connection."""

    peer_id: PeerId
    token: Token
    """Chosen by the peer when it registers; later connections must present the same token."""
    is_member: bool
    """True once the sender knows of its admission. A master that does not know a member must not register it."""
    group: Annotated[int, Meta(ge=0, le=limits.PEER_GROUP_MAX)]
    name: Name
    addresses: Addresses
    """Where this peer listens for data connections, as "host:port", the most likely to work first."""
    connection: Natural = 0
    """Number of this connection of the peer. Messages of an older connection may arrive after those of a newer one."""
    run_id: PeerId = NO_ID
    """The run of the last Welcome; zeros before the first."""
    term: Term = 0
    """The term of the master that sent the last Welcome."""
    promised: Term = 0
    """The term and the leader that the sender has promised to obey; it obeys no other."""
    leader: PeerId = NO_ID
    masters: Annotated[tuple[Address, ...], Meta(max_length=limits.MASTERS_MAX)] = ()
    """The list of masters that the sender is configured with; all peers of a run must have the same, in order."""
    master_index: Annotated[int, Meta(ge=0, lt=limits.MASTERS_MAX)] = 0
    """The index of the receiver in this list."""
    begins: PeerId = NO_ID
    """From a new peer that has several masters: the run that the receiver may begin. The receiver named this run id in
    its refusal (NO_RUN), and since then no other master of the list has led a run. Zeros: it may not begin a run."""
    is_ready: bool = True
    """False: the sender fetches state ahead, and must not be admitted before it sends Ready."""
    handshake_ms: Annotated[int, Meta(ge=0, le=limits.HANDSHAKE_MS_MAX)] = 0
    """The shortest time in which the sender has connected to this master. 0: not known."""
    host: Name = ""
    """The host of the sender, if the peers of that host are to be admitted and removed together; else empty."""
    host_size: Annotated[int, Meta(ge=0, le=limits.HOST_PEERS_MAX)] = 0
    """How many peers that host has."""
    is_returning: bool = False
    """True: the sender was a member of a run that has yielded, and waits to be admitted again."""


class Ready(_Message, tag="ready", frozen=True):
    """The sender may be admitted: it has fetched state ahead, or given that up."""


class Linked(_Message, tag="linked", frozen=True):
    """All peers to which the sender has a link now."""

    peers: PeerIds


class CollectiveSpec(_Message, tag="collective", frozen=True):
    """The arguments of a collective. All voters for one tag must agree on all of them, except `is_root`."""

    tag: int
    count: Annotated[int, Meta(ge=0, le=limits.ELEMENTS_MAX)]
    """A collective without elements is planned and decided like any other, but has no frames."""
    datatype: Annotated[int, Meta(ge=0, le=255)]
    op: Annotated[int, Meta(ge=0, le=255)]
    quantization: Annotated[int, Meta(ge=0, le=255)]
    quantized_datatype: Annotated[int, Meta(ge=0, le=255)]
    block_size: Annotated[int, Meta(ge=1, le=2**31)]
    kind: Annotated[int, Meta(ge=0, le=255)] = 0
    """CollectiveKind. A barrier has no tensor; its count is 0."""
    is_root: bool = False
    """True for exactly one voter of a broadcast: its tensor is sent. The ring begins with it."""
    algorithm: Annotated[int, Meta(ge=0, le=255)] = Algorithm.AUTO
    """RING or DIRECT forces that algorithm where the links allow it."""
    rows: Natural = 0
    """Of an all-to-all: one row for each member that the voter knew of."""
    min_world_size: Natural = 0
    """The collective fails among fewer members."""


class TopologyKind(enum.IntEnum):
    """The topology calls: update_topology, optimize_topology and are_peers_pending."""

    UPDATE = 0
    OPTIMIZE = 1
    PENDING = 2


class TopologySpec(_Message, tag="topology", frozen=True):
    """A call that all members of all groups make."""

    kind: TopologyKind
    after_round: Natural = 0
    """The last round of topology votes that the sender knows to be complete: this vote is for a later one. A call that
    is made again after it was given up keeps the number that it had then."""


class StateEntry(_Message, frozen=True):
    """One tensor of a shared state: what it is and the digest of its contents."""

    key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)]
    datatype: Annotated[int, Meta(ge=0, le=255)]
    count: Natural
    allow_content_inequality: bool
    digest: Digest


StateEntries: TypeAlias = Annotated[tuple[StateEntry, ...], Meta(min_length=1, max_length=limits.STATE_ENTRIES_MAX)]


class SyncSpec(_Message, tag="sync", frozen=True):
    """A sync of the group's shared state: what the sender holds, sorted by key."""

    strategy: Annotated[int, Meta(ge=0, le=2)]
    revision: Annotated[int, Meta(ge=0, le=limits.REVISION_MAX)]
    entries: StateEntries
    digest_kind: Annotated[int, Meta(ge=0, le=255)] = 0
    """The digest function. Digests of different kinds cannot be compared."""


Spec: TypeAlias = CollectiveSpec | TopologySpec | SyncSpec
"""The arguments of a call."""


class Vote(_Message, frozen=True):
    """A call of a member. It takes effect when all members in its scope have made it."""

    call_id: Natural
    spec: Spec
    ahead: Natural = 0
    """The attempt that the sender has started by a plan ahead (Plan.ahead); 0: it waits for a plan."""


class Votes(_Message, tag="votes", frozen=True):
    """A batch of calls."""

    oldest_call_id: Natural
    """The sender's oldest call without an answer: the master may drop the answers to earlier calls."""
    votes: Annotated[tuple[Vote, ...], Meta(min_length=1, max_length=limits.SPECS_PER_MESSAGE_MAX)]


class Dropped(_Message, frozen=True):
    """A source that a fetch has stopped using, for the log of the master."""

    peer: PeerId
    reason: Annotated[str, Meta(max_length=limits.OUTCOME_TEXT_CHARS_MAX)]


class PathSample(_Message, frozen=True):
    """What the path to a peer has carried during an attempt, or a probe."""

    peer_id: PeerId
    sent_bytes: Natural
    busy_us: Annotated[int, Meta(ge=1)]
    """How long there was something to send, or to be acknowledged."""
    round_trip_us: Natural = 0
    """The shortest recent one. 0: not known."""
    is_limited: bool = False
    """The path could carry no more: there was more to send all the time."""
    is_probe: bool = False
    """Measured on purpose: nothing else used the sender's line but what it sent to the peers of this report."""


class Report(_Message, tag="report", frozen=True):
    """How an attempt ended for its sender.

    In a collective, `ok` says whether the sender has the result; in a sync, whether it has fetched all of its plan. A
    peer with nothing to fetch reports only a failure: its own state has changed since its vote. A peer that has
    reported success in a sync may report that failure later, too.
    """

    call_id: Natural
    attempt_id: Natural
    ok: bool
    fault: PeerId | None = None
    """The peer that caused the failure: in a collective, the neighbour whose link failed."""
    reason: Text = ""
    digest: int = 0
    """The digest of a collective's result."""
    duration_us: Natural = 0
    """How long the sender's data plane took from its start to the result, in microseconds; 0: unknown."""
    dropped: Annotated[tuple[Dropped, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    """The sources that a sync has stopped using."""
    count: Annotated[int, Meta(ge=0, le=limits.PEERS_MAX)] = 0
    """How many peers took part in a collective that has a result."""
    paths: Annotated[tuple[PathSample, ...], Meta(max_length=limits.PATHS_SAMPLED_MAX)] = ()
    """Of a collective on a large tensor: what the paths to other participants have carried."""
    other_digest: int | None = None
    """A digest that another participant has told and that differs: that participant may be lost before it reports."""


class Withdraw(_Message, tag="withdraw", frozen=True):
    """Withdraws a call whose timeout has expired or which was interrupted."""

    call_id: Natural
    is_bound: bool = False
    """The sender has told its digest of the attempt that it has started ahead: others may have committed that."""


class MeasurementsRequest(_Message, tag="measurements_request", frozen=True):
    """The sender, a member, asks for Measurements."""


class CheckRequest(_Message, tag="check_request", frozen=True):
    """From any host: asks the master which address it sees, and to dial a port there (control/dial_back.py)."""

    port: Annotated[int, Meta(ge=0, le=65535)]
    """0: the master does not dial."""
    token: Token


class Acknowledgement(_Message, tag="acknowledgement", frozen=True):
    """The sender has accepted the member list of an epoch."""

    epoch: Natural


class Leave(_Message, tag="leave", frozen=True):
    """The sender leaves the run."""


class Running(_Message, frozen=True):
    """An attempt whose plan the sender has, and whose outcome it does not know."""

    plan: Plan
    """The plan of a sync comes without `sources` and `partial_seeds`. Its `fetch` holds the contents that the sender
    will have of keys that allow inequality."""
    spec: CollectiveSpec | None = None
    """None for a sync."""
    is_open: bool = True
    """In a sync, False if the sender has all of the elected state; it may have fetched it."""


class RunReport(_Message, tag="run_report", frozen=True):
    """What a master that takes the run over must know from the sender, except its calls: the sender repeats these."""

    hello: Hello
    oldest_call_id: Natural
    epoch: Annotated[int, Meta(ge=0, le=limits.EPOCH_MAX)]
    members: Annotated[tuple[Member, ...], Meta(max_length=limits.PEERS_MAX)]
    """The member list of that epoch; empty from a pending peer."""
    round: Annotated[int, Meta(ge=0, le=limits.ROUND_MAX)]
    """The last round of topology votes that the sender knows to be complete, and its value."""
    round_value: int
    last_sync: Decision | None
    """The last committed sync of the sender's group."""
    outcomes: Annotated[tuple[Decision, ...], Meta(max_length=limits.OUTCOMES_KEPT_MAX)]
    """The decisions of attempts, and the refusals of several calls, that the sender knows. On the wire one that has
    calls but no order has the order of the one before, and its calls are the steps from the calls there."""
    running: Annotated[tuple[Running, ...], Meta(max_length=limits.CALLS_IN_FLIGHT_MAX)]
    old_members: PeerIds = ()
    """As in Members: empty if the sender knows that the list is committed."""
    parent: Annotated[int, Meta(ge=0, le=limits.EPOCH_MAX)] = 0
    """As in Members."""


class _PackedReport(RunReport, tag="run_report", frozen=True):
    """A RunReport whose longest fields are still encoded."""

    members: msgspec.Raw  # type: ignore[assignment]
    outcomes: msgspec.Raw  # type: ignore[assignment]


# --- From the master to peers ---------------------------------------------------------------------------------------


class Welcome(_Message, tag="welcome", frozen=True):
    """Answers Hello: the peer is registered as pending, or is still what it was before its connection broke."""

    run_id: PeerId
    term: Term
    leader: PeerId = NO_ID
    host_missing: Annotated[int, Meta(ge=0, le=limits.HOST_PEERS_MAX)] = 0
    """Of a pending peer: how many peers of its host have not registered. Another Welcome follows as they come."""


class Refusal(enum.IntEnum):
    """Why the master refused a message."""

    MALFORMED = 0
    UNREGISTERED = 1
    """No Hello came on this connection, or one that may be old: send it, then every message that has no answer yet."""
    UNKNOWN_SESSION = 2
    """The peer was removed, or registered with another master."""
    FULL = 3
    REPORT = 4
    """The master takes over a run from another master: it needs a RunReport first."""
    NO_RUN = 5
    """To a new peer: this master leads no run, and knows of none. Another master may lead one."""
    NO_QUORUM = 6
    """To a new peer: members of a run are connected to this master, but no quorum of them. Or not all peers of its host
    have come, so it should look for them at another master. A peer with no other master is held, and answered later."""
    OTHER_MASTERS = 7
    """The peer has another list of masters than the peers that connected before."""
    YIELDED = 8
    """The run gives way to an earlier run whose members have come back: register with that one."""


class Refused(_Message, tag="refused", frozen=True):
    """The master did not act on a message."""

    refusal: Refusal
    reason: Text
    run_id: PeerId = NO_ID
    """The run that the sender leads, if its member list is committed: then the refusal is final. With NO_RUN, the run
    that the sender would begin: if the master was restarted, it may have led a run in between, and sends another id."""
    term: Term = 0
    """With REPORT, the term that the sender asks to be promised."""
    leader: PeerId = NO_ID
    epoch: Natural = 0
    """Epoch of the committed list without the receiver. Final unless the receiver has accepted a later list."""


class Kick(_Message, tag="kick", frozen=True):
    """The receiver is removed from the run."""

    result: int
    reason: Text


class Members(_Message, tag="members", frozen=True):
    """The member list of an epoch, each group in ring order."""

    epoch: Natural
    members: Annotated[tuple[Member, ...], Meta(max_length=limits.PEERS_MAX)]
    round: Natural = 0
    """The last round of topology votes that is complete, and its value: a new member votes for later ones."""
    round_value: int = 0
    old_members: PeerIds = ()
    """With several masters, until this list is committed: the members of the last committed list (joint consensus)."""
    parent: Natural = 0
    """The epoch of the last list that was committed when this one was proposed."""


class MembersCommitted(_Message, tag="members_committed", frozen=True):
    """The member list of an epoch is committed: quorums of its members and of `old_members` have accepted it."""

    epoch: Natural


class Neighbour(_Message, frozen=True):
    """A peer to which the receiver must have a link."""

    peer_id: PeerId
    name: Name
    addresses: Addresses
    dial: bool
    """True: the receiver dials at once. False: it dials only if the other end has not set the link up by then."""
    link_key: LinkKey = b""
    """Key that the pair shares with the master, to authenticate each other. Empty in a run without a secret."""
    is_member: bool = False
    """Whether it was a member when this was sent: only members offer state to newcomers."""

    def __repr__(self) -> str:
        return f"Neighbour({self.peer_id!r}, {self.name!r}, {self.addresses!r}, dial={self.dial})"


class Neighbours(_Message, tag="neighbours", frozen=True):
    """All peers to which the receiver must have links. It closes its links to others."""

    neighbours: Annotated[tuple[Neighbour, ...], Meta(max_length=limits.PEERS_MAX)]


class NeighboursChanged(_Message, tag="neighbours_changed", frozen=True):
    """The changes since the last Neighbours or NeighboursChanged on this connection."""

    joined: Annotated[tuple[Neighbour, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    gone: PeerIds = ()


class Lane(_Message, frozen=True):
    """A share of the tensor, and the tree over which it is reduced: up to its root, and down again."""

    share: Annotated[int, Meta(ge=0, le=limits.LANE_SHARE_MAX)]
    """The weight of the share, relative to those of the other lanes."""
    root: Rank
    parents: Annotated[tuple[Rank, ...], Meta(max_length=limits.DIRECT_PEERS_MAX)] = ()
    """The parent of each rank; the root names itself. Empty: the root is the parent of all."""


class Reducing(_Message, tag="reduce", frozen=True):
    """How a collective moves tensors. It is the same for all participants, so a new master can restore it from one."""

    order: PeerIds
    """All participants: the order of the ring, or of the ranks."""
    frame_bytes: FrameBytes
    algorithm: PlannedAlgorithm = Algorithm.RING
    lanes: Annotated[tuple[Lane, ...], Meta(max_length=limits.DIRECT_PEERS_MAX)] = ()
    """Only TREES has lanes."""
    pace_us: Natural = 0
    """With lanes: how long a peer spreads what it sends over each link. 0: it sends as fast as possible."""

    def __post_init__(self) -> None:
        if bool(self.lanes) != (self.algorithm == Algorithm.TREES):
            raise ValueError("trees have lanes, other algorithms have none")
        if self.lanes and not any(lane.share for lane in self.lanes):
            raise ValueError("no lane has a share")
        if any(lane.parents and len(lane.parents) != len(self.order) for lane in self.lanes):
            raise ValueError("a lane names one parent for each participant, or none")
        if any(max((lane.root, *lane.parents)) >= len(self.order) for lane in self.lanes):
            raise ValueError("a lane names a rank that no participant has")
        if sum(len(lane.parents) for lane in self.lanes) > limits.LANE_PARENTS_MAX:
            raise ValueError(f"lanes name more than {limits.LANE_PARENTS_MAX} parents")


class FetchEntry(_Message, frozen=True):
    """A tensor that the receiver must fetch, with the digest that it must have then."""

    key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)]
    digest: Digest


class Fetching(_Message, tag="fetch", frozen=True):
    """The outcome of an election: what the receiver fetches, and from which peers. It serves what it has."""

    order: PeerIds
    """All participants."""
    revision: Natural
    holders: PeerIds
    """The peers that held the whole elected state, the winner first."""
    fetch: Annotated[tuple[FetchEntry, ...], Meta(max_length=limits.STATE_ENTRIES_MAX)] = ()
    sources: PeerIds = ()
    """The peers with a link to the receiver that have all of `fetch` now, the best first."""
    partial_seeds: PeerIds = ()
    """The peers with a link to the receiver that fetch the same, and serve the blocks that they have verified."""


class Plan(_Message, tag="plan", frozen=True):
    """Starts an attempt. A call that has started another attempt by a plan ahead ends that one first."""

    attempt_id: Natural
    calls: CallIds
    """The call of each participant in this attempt."""
    how: Reducing | Fetching
    ahead: PlansAhead = ()
    """When the receiver makes the same call again, it may start the first of these attempts at once, in the same way,
    and the next ones after that."""

    @property
    def order(self) -> PeerIds:
        """All participants."""
        return self.how.order

    @property
    def participants(self) -> dict[bytes, int]:
        """All participants, with the call of each."""
        return dict(zip(self.how.order, self.calls, strict=False))


class Decision(_Message, tag="decision", frozen=True):
    """The outcome of a call. All calls of an attempt, or of one refusal of several calls, have the same outcome."""

    call_id: Natural
    result: int
    value: int = 0
    """For a collective, the number of peers that took part; for a sync, the revision that all have now."""
    reason: Text = ""
    field: Name = ""
    """The argument in which the calls differ, if that is why they are refused."""
    values: Values = ()
    round: Natural = 0
    """The number of the round of topology votes that this completes."""
    attempt_id: Natural = 0
    """The attempt. A refusal of several calls has an id from the same sequence. 0: this concerns a single call."""
    order: PeerIds = ()
    """The peers that get this outcome, each for its call in `calls`; empty if the receiver knows them from a plan."""
    calls: CallIds = ()
    peers: Annotated[tuple[PlainName, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    """The names of the peers that an aborted attempt is attributed to."""
    ahead: PlansAhead = ()
    """With the commit of a collective: more attempts as in Plan.ahead."""
    is_ahead_void: bool = False
    """With the commit of a collective: the next plan at its tag differs from that of the attempts ahead."""

    @property
    def committed(self) -> bool:
        """True for a committed attempt."""
        return self.result == Result.SUCCESS and self.attempt_id > 0

    @property
    def is_of_attempt(self) -> bool:
        """True for the decision of an attempt. A refusal of several calls has an attempt id without an attempt."""
        return self.attempt_id > 0 and not self.is_refusal

    @property
    def is_refusal(self) -> bool:
        """True for calls that end without an attempt."""
        return self.result in REFUSALS


REFUSALS = frozenset(
    {Result.INVALID_ARGUMENT, Result.INVALID_USAGE, Result.TOO_FEW_PEERS, Result.NO_SHARED_STATE_AVAILABLE}
)
"""Results of calls that end without an attempt."""


class CheckAnswer(_Message, tag="check_answer", frozen=True):
    """Answers CheckRequest."""

    host: Address
    """The address that the connection comes from; empty if it is not known."""
    is_dialling: bool
    """False: no port was asked for, or too many hosts ask at the same time."""
    unix_ms: Natural
    """The clock of the master."""


class MeasuredPath(_Message, frozen=True):
    """What is known of the path from one member to another."""

    sender: MemberIndex
    receiver: MemberIndex
    age_ms: Natural
    """How long ago the rate was measured, or the path was used last."""
    bytes_per_second: Rate | None = None
    """None: the path has never been the limit."""
    round_trip_us: Natural | None = None


class MeasuredHost(_Message, frozen=True):
    """What a member sends and receives at most over all its paths together, in bytes per second."""

    member: MemberIndex
    sent_per_second: Rate | None = None
    received_per_second: Rate | None = None


class Measurements(_Message, tag="measurements", frozen=True):
    """What the master knows of the network from the data that collectives have moved. What is not listed is unknown."""

    members: Annotated[tuple[Member, ...], Meta(max_length=limits.PEERS_MAX)]
    """All members, of all groups."""
    paths: Annotated[tuple[MeasuredPath, ...], Meta(max_length=limits.PATHS_TOLD_MAX)] = ()
    hosts: Annotated[tuple[MeasuredHost, ...], Meta(max_length=limits.PEERS_MAX)] = ()

    def __post_init__(self) -> None:
        indexes = {index for path in self.paths for index in (path.sender, path.receiver)}
        if max(indexes | {host.member for host in self.hosts}, default=-1) >= len(self.members):
            raise ValueError("a path or host has an index without a member")


_NoReport: TypeAlias = (
    Hello | Ready | Linked | Votes | Report | Withdraw | MeasurementsRequest | CheckRequest | Acknowledgement | Leave
)
PeerMessage: TypeAlias = _NoReport | RunReport
MasterMessage: TypeAlias = (
    Welcome
    | Refused
    | Kick
    | Members
    | MembersCommitted
    | Neighbours
    | NeighboursChanged
    | Plan
    | Decision
    | Measurements
    | CheckAnswer
)
Message: TypeAlias = PeerMessage | MasterMessage

_encoder = msgspec.msgpack.Encoder()
_peer_decoder: msgspec.msgpack.Decoder[_NoReport | _PackedReport] = msgspec.msgpack.Decoder(_NoReport | _PackedReport)
_REPORT_TYPES = get_type_hints(RunReport, include_extras=True)
_members_decoder: msgspec.msgpack.Decoder[tuple[Member, ...]] = msgspec.msgpack.Decoder(_REPORT_TYPES["members"])
_outcomes_decoder: msgspec.msgpack.Decoder[tuple[Decision, ...]] = msgspec.msgpack.Decoder(_REPORT_TYPES["outcomes"])
_master_decoder: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)
_PREFIX = MAGIC + bytes([limits.PROTOCOL_VERSION])
_COMPRESSED = b"\xc1"
"""The only byte that MessagePack never uses, before a large RunReport that is compressed."""
_UINT64_MAX = 0xFFFF_FFFF_FFFF_FFFF
"""The largest integer in MessagePack."""


def name_of(kind: type[enum.IntEnum], value: int) -> str:
    """The name of a value that a peer sent; its number if it is unknown here."""
    return kind(value).name if value in set(kind) else str(value)


def cut(text: str, bytes_max: int) -> str:
    """The longest prefix of a text that is at most `bytes_max` bytes of UTF-8."""
    return text.encode()[:bytes_max].decode(errors="ignore")


class Malformed(ProtocolViolation):
    """The bytes are not a message."""


class OtherVersion(ProtocolViolation):
    """The bytes are a message of another protocol version.

    Attributes:
        version: the version of the sender.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}; this side speaks {limits.PROTOCOL_VERSION}")
        self.version = version


_Part = TypeVar("_Part")


def _known(decode: Callable[[bytes], _Part]) -> Callable[[bytes], _Part]:
    """Decodes a part of a report, or takes it from one of the last reports: all members tell much the same.

    In a group of 1,000 a report takes milliseconds otherwise, and a master that takes over waits only some seconds.
    """
    remembered = functools.lru_cache(limits.REPORT_PARTS_KEPT_MAX)(decode)

    @functools.wraps(decode)
    def known(part: bytes) -> _Part:
        return remembered(part) if len(part) <= limits.REPORT_PART_KEPT_BYTES_MAX else decode(part)

    return known


def _without_repetition(report: RunReport) -> RunReport:
    order: tuple[bytes, ...] = ()
    calls: tuple[int, ...] = ()
    outcomes = []
    for outcome in report.outcomes:
        told = outcome
        if outcome.calls and outcome.order == order and len(outcome.calls) == len(calls):
            steps = tuple((new - old) & _UINT64_MAX for old, new in zip(calls, outcome.calls, strict=True))
            told = replace(outcome, order=(), calls=steps)
        if outcome.calls:
            order, calls = outcome.order, outcome.calls
        outcomes.append(told)
    return replace(report, outcomes=tuple(outcomes))


@_known
def _members_of(part: bytes) -> tuple[Member, ...]:
    return _decode(_members_decoder, part)


@_known
def _outcomes_of(part: bytes) -> tuple[Decision, ...]:
    order: tuple[bytes, ...] = ()
    calls: tuple[int, ...] = ()
    outcomes = []
    found = _decode(_outcomes_decoder, part)
    count = sum(len(told.calls) for told in found)
    if count > limits.OUTCOME_CALLS_KEPT_MAX:
        raise Malformed(f"outcomes of {count} calls; at most {limits.OUTCOME_CALLS_KEPT_MAX} are remembered")
    for told in found:
        outcome = told
        if told.calls and not told.order:
            if len(told.calls) != len(calls):
                raise Malformed(f"{len(told.calls)} steps from {len(calls)} calls")
            sums = tuple((old + step) & _UINT64_MAX for old, step in zip(calls, told.calls, strict=True))
            outcome = replace(told, order=order, calls=sums)
        if outcome.calls:
            order, calls = outcome.order, outcome.calls
        outcomes.append(outcome)
    return tuple(outcomes)


def encode(message: Message) -> bytes:
    """Encodes a message. A RunReport names the same peers again and again, so that a large one is compressed."""
    body = _encoder.encode(_without_repetition(message) if isinstance(message, RunReport) else message)
    if isinstance(message, RunReport) and len(body) > limits.REPORT_PLAIN_BYTES_MAX:
        body = _COMPRESSED + zlib.compress(body, level=1)
    return _PREFIX + body


def is_compressed(data: bytes) -> bool:
    """True if decoding takes much longer than for other messages of this size."""
    return data.startswith(_COMPRESSED, len(_PREFIX))


_Decoded = TypeVar("_Decoded")


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], body: bytes | memoryview) -> _Decoded:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)[: limits.MALFORMED_TEXT_CHARS_MAX]) from None


def _expanded(body: memoryview) -> bytes:
    expander = zlib.decompressobj()
    try:
        expanded = expander.decompress(body[len(_COMPRESSED) :], limits.MESSAGE_BYTES_MAX)
    except zlib.error as error:
        raise Malformed(f"a report that cannot be expanded: {error}") from None
    if not expander.eof or expander.unused_data:
        raise Malformed(f"a report that is cut off, or has more than {limits.MESSAGE_BYTES_MAX} bytes")
    return expanded


def _body(data: bytes) -> memoryview:
    if len(data) > limits.MESSAGE_BYTES_MAX:
        raise Malformed(f"{len(data)} bytes; at most {limits.MESSAGE_BYTES_MAX} are allowed")
    if data[: len(MAGIC)] != MAGIC or len(data) <= len(MAGIC):
        raise Malformed(f"{len(data)} bytes that do not begin as a zpccl message")
    if data[len(MAGIC)] != limits.PROTOCOL_VERSION:
        raise OtherVersion(data[len(MAGIC)])
    return memoryview(data)[len(_PREFIX) :]


def decode_peer_message(data: bytes) -> PeerMessage:
    """Decodes what a peer sent to the master.

    Raises:
        Malformed: the bytes are not such a message.
        OtherVersion: they are of another protocol version.
    """
    body = _body(data)
    message = _decode(_peer_decoder, _expanded(body) if is_compressed(data) else body)
    if isinstance(message, _PackedReport):
        if len(body) > limits.REPORT_PLAIN_BYTES_MAX and not is_compressed(data):  # It may take long to decode, too.
            raise Malformed(f"a report of {len(body)} bytes that is not compressed")
        parts = {"members": _members_of(bytes(message.members)), "outcomes": _outcomes_of(bytes(message.outcomes))}
        return RunReport(**{name: getattr(message, name) for name in RunReport.__struct_fields__} | parts)
    if is_compressed(data):
        raise Malformed("a compressed message that is no report")
    return message


def decode_master_message(data: bytes) -> MasterMessage:
    """Decodes what the master sent to a peer.

    Raises:
        Malformed: the bytes are not such a message.
        OtherVersion: they are of another protocol version.
    """
    return _decode(_master_decoder, _body(data))
