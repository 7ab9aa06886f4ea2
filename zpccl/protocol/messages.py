"""The control messages between peers and master, and their encoding.

A message on the wire is one ZeroMQ frame: MAGIC, one byte of protocol version, then a MessagePack array that begins
with the name of the message. Peers number their calls; `call_id` names a call in every message about it, so that a
message may be sent twice without harm. Ids of attempts grow and never repeat within a run.

Messages of peers are `PeerMessage`, those of the master `MasterMessage`. Both are values: equal when their fields are.
"""

from __future__ import annotations

import enum
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from zpccl import limits
from zpccl.errors import ProtocolViolation, Result
from zpccl.types import Algorithm

MAGIC = b"zp"

PeerId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Token: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Natural: TypeAlias = Annotated[int, Meta(ge=0)]
Term: TypeAlias = Annotated[int, Meta(ge=0, le=limits.TERM_MAX)]
Name: TypeAlias = Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
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
PlannedAlgorithm: TypeAlias = Annotated[int, Meta(ge=1, le=2)]
"""Of `Algorithm`; a plan leaves nothing open."""
FrameBytes: TypeAlias = Annotated[int, Meta(ge=1, le=limits.FRAME_BYTES_MAX)]
Digest: TypeAlias = Annotated[bytes, Meta(min_length=32, max_length=32)]


NO_ID = bytes(16)
"""In place of the id of a run or of a leader: none."""


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages: a tagged MessagePack array."""


# --- From peers to the master ---------------------------------------------------------------------------------------


class Member(_Message, frozen=True):
    """One member of the run."""

    peer_id: PeerId
    group: int
    name: Name


class Hello(_Message, tag="hello", frozen=True):
    """Registers a new peer, or claims a registered one on a new connection."""

    peer_id: PeerId
    token: Token
    """Chosen by the peer when it registers; later connections must show the same."""
    is_member: bool
    """False until the sender has heard of its admission: only then a master that does not know it may register it."""
    group: Annotated[int, Meta(ge=0, le=limits.PEER_GROUP_MAX)]
    name: Name
    addresses: Addresses
    """Where this peer listens for data connections, "host:port", the most likely first."""
    connection: Natural = 0
    """Counts the connections of this peer. What was sent on an older one may come after what was sent on a newer."""
    run_id: PeerId = NO_ID
    """The run that welcomed the sender last; zeros before that."""
    term: Term = 0
    """Of the master that welcomed the sender last."""
    promised: Term = 0
    """The term and the leader that the sender has promised itself to: it obeys no other one."""
    leader: PeerId = NO_ID
    masters: Annotated[tuple[Address, ...], Meta(max_length=limits.MASTERS_MAX)] = ()
    """The list of masters that the sender was given; the same for all peers of a run, in the same order."""
    master_index: Annotated[int, Meta(ge=0, lt=limits.MASTERS_MAX)] = 0
    """The place of the receiver in this list."""
    begins: PeerId = NO_ID
    """Of a newcomer that was named several masters: the run that this one may begin, by the id it gave it when it
    refused, since when no other of the list leads one. Zeros: it may begin none."""
    is_ready: bool = True
    """False: the sender fetches state ahead, and shall not be admitted before it says Ready."""
    handshake_ms: Annotated[int, Meta(ge=0, le=limits.HANDSHAKE_MS_MAX)] = 0
    """How long it takes the sender to connect to this master: the shortest time that it has seen. 0: not known."""


class Ready(_Message, tag="ready", frozen=True):
    """The sender, which has fetched state ahead or gave that up, may be admitted."""


class Linked(_Message, tag="linked", frozen=True):
    """All peers to whom the sender has a link now."""

    peers: PeerIds


class CollectiveSpec(_Message, tag="collective", frozen=True):
    """What all voters for one tag must agree on, but for `is_root`."""

    tag: int
    count: Annotated[int, Meta(ge=1, le=limits.ELEMENTS_MAX)]
    datatype: Annotated[int, Meta(ge=0, le=255)]
    op: Annotated[int, Meta(ge=0, le=255)]
    quantization: Annotated[int, Meta(ge=0, le=255)]
    quantized_datatype: Annotated[int, Meta(ge=0, le=255)]
    block_elements: Annotated[int, Meta(ge=1, le=2**31)]
    kind: Annotated[int, Meta(ge=0, le=255)] = 0
    """CollectiveKind. A barrier has no tensor; its count is 1."""
    is_root: bool = False
    """Of a broadcast, on exactly one of the voters: what it holds is sent. The ring begins with it."""
    algorithm: Annotated[int, Meta(ge=0, le=255)] = Algorithm.AUTO
    """RING or DIRECT to force one, where the links allow it."""


class TopologyKind(enum.IntEnum):
    """What all members decide together."""

    UPDATE = 0
    OPTIMIZE = 1
    PENDING = 2


class TopologySpec(_Message, tag="topology", frozen=True):
    """A call of all members of all groups."""

    kind: TopologyKind
    after_round: Natural = 0
    """The last round of topology votes whose end the sender knows: this vote is for a later one."""


class StateEntry(_Message, frozen=True):
    """One tensor of a shared state: what it is and the digest of its contents."""

    key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)]
    datatype: Annotated[int, Meta(ge=0, le=255)]
    count: Natural
    allow_content_inequality: bool
    digest: Digest


StateEntries: TypeAlias = Annotated[tuple[StateEntry, ...], Meta(min_length=1, max_length=limits.STATE_ENTRIES_MAX)]


class SyncSpec(_Message, tag="sync", frozen=True):
    """A sync of the shared state of the group: what the sender holds. Entries are sorted by key."""

    strategy: Annotated[int, Meta(ge=0, le=2)]
    revision: Annotated[int, Meta(ge=0, le=limits.REVISION_MAX)]
    entries: StateEntries
    digest_kind: Annotated[int, Meta(ge=0, le=255)] = 0
    """How the digests were made: those of different kinds cannot be compared."""


Spec: TypeAlias = CollectiveSpec | TopologySpec | SyncSpec
"""What a member calls."""


class Vote(_Message, frozen=True):
    """A call of a member, which takes effect when all in its scope have made it."""

    call_id: Natural
    spec: Spec


class Votes(_Message, tag="votes", frozen=True):
    """A batch of calls."""

    oldest_call_id: Natural
    """The sender's oldest call without an answer: answers before it need not be kept."""
    votes: Annotated[tuple[Vote, ...], Meta(min_length=1, max_length=limits.SPECS_PER_MESSAGE_MAX)]


class Dropped(_Message, frozen=True):
    """A source that a fetch goes on without, for those who look after the run."""

    peer: PeerId
    reason: Annotated[str, Meta(max_length=limits.OUTCOME_TEXT_CHARS_MAX)]


class Report(_Message, tag="report", frozen=True):
    """How an attempt ended for its sender.

    Of a collective: it has its result, or failed. Of a sync: it holds all that it was told to fetch, or could not. Who
    has nothing to fetch says so only if it finds that its own state has changed since its vote: then `ok` is false. So
    may a sender that has reported success before.
    """

    call_id: Natural
    attempt_id: Natural
    ok: bool
    fault: PeerId | None = None
    """The peer by which it failed: of a collective the neighbour whose link did."""
    reason: Text = ""
    digest: int = 0
    """Of the result of a collective."""
    duration_us: Natural = 0
    """How long the sender's data plane took from its start to the result, in microseconds; 0: unknown."""
    dropped: Annotated[tuple[Dropped, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    """The sources that a sync went on without."""


class Withdraw(_Message, tag="withdraw", frozen=True):
    """Takes a call back: its timeout ran out or it was interrupted."""

    call_id: Natural


class Acknowledgement(_Message, tag="acknowledgement", frozen=True):
    """The sender has accepted the member list of an epoch. Said where there are several masters."""

    epoch: Natural


class Leave(_Message, tag="leave", frozen=True):
    """The sender leaves the run."""


class Running(_Message, frozen=True):
    """An attempt of which the sender has the plan, and does not know the end."""

    plan: Plan
    """Of a sync without what the sender itself fetches, and from whom."""
    spec: CollectiveSpec | None = None
    """Of a collective."""
    is_open: bool = True
    """Of a sync: there was something to fetch, or the sender has lost what it held, so that it is yet to report."""


class RunReport(_Message, tag="run_report", frozen=True):
    """All that a master which takes the run over must know from the sender, beside the calls that it makes again."""

    hello: Hello
    oldest_call_id: Natural
    epoch: Annotated[int, Meta(ge=0, le=limits.EPOCH_MAX)]
    members: Annotated[tuple[Member, ...], Meta(max_length=limits.PEERS_MAX)]
    """The member list of that epoch; empty from a pending peer."""
    is_updating: bool
    """The sender waits in update_topology: members may have been admitted of whom it has not heard."""
    round: Annotated[int, Meta(ge=0, le=limits.ROUND_MAX)]
    """The last round of topology votes of which the sender knows, and its value."""
    round_value: int
    last_sync: Decision | None
    """The last sync of the sender's group that was committed."""
    outcomes: Annotated[tuple[Decision, ...], Meta(max_length=limits.OUTCOMES_KEPT_MAX)]
    """The ends of attempts, and refusals of several calls, that the sender knows of."""
    running: Annotated[tuple[Running, ...], Meta(max_length=limits.CALLS_IN_FLIGHT_MAX)]
    old_members: PeerIds = ()
    """As in Members: empty where the list is committed, as far as the sender knows."""
    parent: Annotated[int, Meta(ge=0, le=limits.EPOCH_MAX)] = 0
    """As in Members."""


# --- From the master to peers ---------------------------------------------------------------------------------------


class Welcome(_Message, tag="welcome", frozen=True):
    """The sender of Hello is registered: pending, or still what it was before its connection broke."""

    run_id: PeerId
    term: Term
    leader: PeerId = NO_ID


class Refusal(enum.IntEnum):
    """Why the master refused a message."""

    MALFORMED = 0
    UNREGISTERED = 1
    """The connection did not say Hello: say it, then everything that waits for an answer."""
    UNKNOWN_SESSION = 2
    """The peer was removed, or the master is another one."""
    FULL = 3
    REPORT = 4
    """The master takes the run over from another one: it needs a RunReport first."""
    NO_RUN = 5
    """To a newcomer: this master leads no run, and knows of none. Another one may."""
    NO_QUORUM = 6
    """To a newcomer: members of a run are here, but too few to go on with it."""
    OTHER_MASTERS = 7
    """The sender was given another list of masters than others that have come here."""
    YIELDED = 8
    """The run gives way to an earlier one, of which members have come back: register with that one."""


class Refused(_Message, tag="refused", frozen=True):
    """The master did not act on a message."""

    refusal: Refusal
    reason: Text
    run_id: PeerId = NO_ID
    """The run that the sender leads, where the list of members is committed: then the refusal is final. With NO_RUN the
    one that it would begin: one that was started anew since may have led a run meanwhile, and gives another id."""
    term: Term = 0
    """Where it asks for a report, what it asks to be promised."""
    leader: PeerId = NO_ID
    epoch: Natural = 0
    """Of the committed list that the receiver is not in: final for who has accepted none after it."""


class Kick(_Message, tag="kick", frozen=True):
    """The receiver is removed from the run."""

    result: int
    reason: Text


class Members(_Message, tag="members", frozen=True):
    """The member list of an epoch, each group in ring order."""

    epoch: Natural
    members: Annotated[tuple[Member, ...], Meta(max_length=limits.PEERS_MAX)]
    round: Natural = 0
    """The last round of topology votes that is complete, and its value: a newcomer votes after it."""
    round_value: int = 0
    old_members: PeerIds = ()
    """Where the run has several masters, until the list is committed: the members of the last one that is."""
    parent: Natural = 0
    """The epoch of the last list that was committed when this one was proposed."""


class MembersCommitted(_Message, tag="members_committed", frozen=True):
    """A quorum of the members, and of those before them, has the member list of an epoch."""

    epoch: Natural


class Neighbour(_Message, frozen=True):
    """A peer that the receiver shall have a link to."""

    peer_id: PeerId
    name: Name
    addresses: Addresses
    dial: bool
    """True: the receiver dials. False: it is dialled."""
    link_key: LinkKey = b""
    """Known to this pair and the master: proves each to the other. Empty in a run without a secret."""

    def __repr__(self) -> str:
        return f"Neighbour({self.peer_id!r}, {self.name!r}, {self.addresses!r}, dial={self.dial})"


class Neighbours(_Message, tag="neighbours", frozen=True):
    """All peers that the receiver shall have links to. Links to others are closed."""

    neighbours: Annotated[tuple[Neighbour, ...], Meta(max_length=limits.PEERS_MAX)]


class NeighboursChanged(_Message, tag="neighbours_changed", frozen=True):
    """What has changed since the last Neighbours or NeighboursChanged on this connection."""

    joined: Annotated[tuple[Neighbour, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    gone: PeerIds = ()


class Lane(_Message, frozen=True):
    """A share of the tensor, and who reduces it and how. A plan has one lane with the whole tensor."""

    order: PeerIds
    """That of the ring; in a direct exchange that of the ranks."""
    algorithm: PlannedAlgorithm = Algorithm.RING


class Reducing(_Message, tag="reduce", frozen=True):
    """How a collective moves tensors. All who take part get the same, so what one knows suffices to go on with it."""

    lanes: Annotated[tuple[Lane, ...], Meta(min_length=1, max_length=1)]
    frame_bytes: FrameBytes

    @property
    def order(self) -> PeerIds:
        """All who take part."""
        return self.lanes[0].order


class FetchEntry(_Message, frozen=True):
    """A tensor that the receiver must fetch, with the digest that it must then have."""

    key: Annotated[str, Meta(max_length=limits.KEY_CHARS_MAX)]
    digest: Digest


class Fetching(_Message, tag="fetch", frozen=True):
    """The outcome of an election: what the receiver fetches, and from whom. Whoever has something of it serves it."""

    order: PeerIds
    """All who take part."""
    revision: Natural
    holders: PeerIds
    """Who had all that was elected, the winner first."""
    fetch: Annotated[tuple[FetchEntry, ...], Meta(max_length=limits.STATE_ENTRIES_MAX)] = ()
    sources: PeerIds = ()
    """Who has all of it now, of those to whom the receiver has a link, the best first."""
    fellows: PeerIds = ()
    """Who fetches the same, of those to whom the receiver has a link: what one has checked it serves to the others."""


class Plan(_Message, tag="plan", frozen=True):
    """Starts an attempt."""

    attempt_id: Natural
    calls: CallIds
    """The call of each of those who take part that this attempt is for."""
    how: Reducing | Fetching

    @property
    def order(self) -> PeerIds:
        """All who take part."""
        return self.how.order

    @property
    def participants(self) -> dict[bytes, int]:
        """All who take part, and the call of each."""
        return dict(zip(self.how.order, self.calls, strict=False))


class Decision(_Message, tag="decision", frozen=True):
    """Ends a call, and says how. That of an attempt, and of a refusal of several calls, is the same for all."""

    call_id: Natural
    result: int
    value: int = 0
    """Of a collective: the peers that took part. Of a sync: the revision that all have now."""
    reason: Text = ""
    field: Name = ""
    """The argument that differs, for calls whose arguments do."""
    values: Values = ()
    round: Natural = 0
    """The number of the round of topology votes that is complete with this."""
    attempt_id: Natural = 0
    """Of the attempt, or the number among attempts of a refusal of several calls. 0: this concerns one call alone."""
    order: PeerIds = ()
    """Who gets this outcome, and for which call each: said where the receiver may not know it from a plan."""
    calls: CallIds = ()
    peers: Annotated[tuple[Name, ...], Meta(max_length=limits.PEERS_MAX)] = ()
    """The names of those at whom an attempt failed."""

    @property
    def committed(self) -> bool:
        """True for an attempt that counts."""
        return self.result == Result.SUCCESS and self.attempt_id > 0

    @property
    def is_of_attempt(self) -> bool:
        """True for the end of an attempt. A refusal of several calls has no more than a number among these."""
        return self.attempt_id > 0 and not self.is_refusal

    @property
    def is_refusal(self) -> bool:
        """True for calls that end without an attempt."""
        return self.result in REFUSALS


REFUSALS = frozenset(
    {Result.INVALID_ARGUMENT, Result.INVALID_USAGE, Result.TOO_FEW_PEERS, Result.NO_SHARED_STATE_AVAILABLE}
)
"""Results of calls that end without an attempt."""


PeerMessage: TypeAlias = Hello | Ready | Linked | Votes | Report | Withdraw | Acknowledgement | Leave | RunReport
MasterMessage: TypeAlias = (
    Welcome | Refused | Kick | Members | MembersCommitted | Neighbours | NeighboursChanged | Plan | Decision
)
Message: TypeAlias = PeerMessage | MasterMessage

_encoder = msgspec.msgpack.Encoder()
_peer_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
_master_decoder: msgspec.msgpack.Decoder[MasterMessage] = msgspec.msgpack.Decoder(MasterMessage)
_PREFIX = MAGIC + bytes([limits.PROTOCOL_VERSION])


def cut(text: str, bytes_max: int) -> str:
    """The beginning of a text that takes no more in a message."""
    return text.encode()[:bytes_max].decode(errors="ignore")


class Malformed(ProtocolViolation):
    """The bytes are no message."""


class OtherVersion(ProtocolViolation):
    """The bytes are a message of another protocol version.

    Attributes:
        version: the version of the sender.
    """

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}; this side speaks {limits.PROTOCOL_VERSION}")
        self.version = version


def encode(message: Message) -> bytes:
    """The bytes of a message."""
    return _PREFIX + _encoder.encode(message)


_Decoded = TypeVar("_Decoded")


def _decode(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes) -> _Decoded:
    body = _body(data)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(str(error)[: limits.MALFORMED_TEXT_CHARS_MAX]) from None


def _body(data: bytes) -> memoryview:
    if len(data) > limits.MESSAGE_BYTES_MAX:
        raise Malformed(f"{len(data)} bytes; at most {limits.MESSAGE_BYTES_MAX} are allowed")
    if data[: len(MAGIC)] != MAGIC or len(data) <= len(MAGIC):
        raise Malformed(f"{len(data)} bytes that do not begin as a zpccl message")
    if data[len(MAGIC)] != limits.PROTOCOL_VERSION:
        raise OtherVersion(data[len(MAGIC)])
    return memoryview(data)[len(_PREFIX) :]


def decode_peer_message(data: bytes) -> PeerMessage:
    """What a peer sent to the master.

    Raises:
        Malformed: the bytes are no such message.
        OtherVersion: they are of another protocol version.
    """
    return _decode(_peer_decoder, data)


def decode_master_message(data: bytes) -> MasterMessage:
    """What the master sent to a peer.

    Raises:
        Malformed: the bytes are no such message.
        OtherVersion: they are of another protocol version.
    """
    return _decode(_master_decoder, data)
