"""Every bound, timeout and default of zpccl, with its unit as the last word of its name."""

from __future__ import annotations

US = 1_000
"""Nanoseconds in a microsecond."""
MS = 1_000_000
"""Nanoseconds in a millisecond."""
SECOND = 1_000_000_000
"""Nanoseconds in a second."""
KIB = 1024
MIB = 1024 * 1024

# --- Addresses ------------------------------------------------------------------------------------------------------
MASTER_PORT = 48148
PEER_PORT_FIRST = 48149
PEER_PORT_COUNT = 1000
"""Peers listen on the first free port of [PEER_PORT_FIRST, PEER_PORT_FIRST + PEER_PORT_COUNT)."""
ADDRESSES_PER_PEER_MAX = 8
ADDRESS_CHARS_MAX = 270
"""A host name of 253 characters, brackets, a zone and a port."""

# --- Control plane --------------------------------------------------------------------------------------------------
PROTOCOL_VERSION = 9
MESSAGE_BYTES_MAX = 8 * MIB
"""One control message. libzmq drops the connection of a sender that exceeds it."""
CONTROL_QUEUE_MESSAGES_MAX = 10_000
"""High-water mark of what waits to be sent on a control connection."""
CONTROL_BATCH_BYTES_MAX = 1 * MIB
"""What a master reads before it handles it."""
PEERS_MAX = 2048
"""Members and pending peers of one run."""
PENDING_PEERS_MAX = 256
CALLS_IN_FLIGHT_MAX = 1024
"""Unanswered calls of one peer in a small group: see calls_in_flight_max."""
CALLS_NAMED_MAX = 65_536
"""What the attempts of one peer's calls in flight may name of calls, of all members together."""
ANSWERS_KEPT_MAX = 4 * CALLS_IN_FLIGHT_MAX
"""Answers kept for a peer that does not say that it got them. Those that a broken connection can have cost it are the
latest, and no more than CALLS_IN_FLIGHT_MAX: it had no answer to any of them."""
PARTIAL_REFUSALS_KEPT_MAX = 8
"""Refusals that peers remember beside the ends of calls of the whole group: only some of its members have part in them,
or members of other groups too."""
OUTCOMES_KEPT_MAX = CALLS_IN_FLIGHT_MAX + PARTIAL_REFUSALS_KEPT_MAX
"""Ends of attempts in a report; how many a peer remembers follows from the size of its group (memory.py)."""
OUTCOME_CALLS_KEPT_MAX = CALLS_NAMED_MAX + PARTIAL_REFUSALS_KEPT_MAX * PEERS_MAX
"""Calls named in all outcomes that a peer remembers."""
OUTCOME_TEXT_CHARS_MAX = 400
"""Reasons in remembered outcomes are cut to this."""
MISMATCH_VALUES_MAX = 4
"""Values named where peers differ in an argument; the rest is counted. They are remembered in outcomes too."""
MISMATCH_VALUE_BYTES_MAX = 200
"""Text of each of them, with the peers that gave it."""
SPECS_PER_MESSAGE_MAX = 1024
SMALL_TENSOR_BYTES = 64 * KIB
"""A smaller tensor takes longer to vote for than to reduce: `max_in_flight` does not count it."""
NAME_CHARS_MAX = 128
KEY_CHARS_MAX = 1024
STATE_ENTRIES_MAX = 65_536
EXPLAINED_PEERS_MAX = 16
"""Peers named in one line of a master's log about a sync; the rest is counted."""
STATE_ENTRY_BYTES_MAX = 64
"""What an entry takes in a message, beside its key."""
TEXT_CHARS_MAX = 4096
"""A text for people in a message: reasons are cut to it."""
MALFORMED_TEXT_CHARS_MAX = 400
"""What is said of bytes that are no message; they may be hostile and go to the log."""
TAG_MAX = 2**64 - 1
PEER_GROUP_MAX = 2**32 - 1
REVISION_MAX = 2**63 - 1
POLL_EVENTS_MAX = 256
"""Messages that a loop takes from a socket before it turns to the others."""
MEMBER_BYTES_MAX = MESSAGE_BYTES_MAX + MIB
"""What a member's connection has sent to a master and is not in a message that the master took: held by ZeroMQ."""
PENDING_BYTES_MAX = 256 * KIB
"""The same of a pending peer. Heartbeats count: after an hour of silence it has to connect again."""
STRANGER_BYTES_MAX = 32 * KIB
"""What a connection may send to a master before it has registered: a Hello has 3 KiB at most."""
OUTSIDERS_BYTES_MAX = 8 * MIB
"""All that ZeroMQ holds of strangers and pending peers. In memory it may be 32 times as much: parts of no bytes."""
CONNECTIONS_BYTES_MAX = 128 * MIB
"""All that ZeroMQ holds of all connections to a master."""
MEMBER_UNSENT_BYTES_MAX = 64 * MIB
"""What waits to be sent to a member, beside CONTROL_QUEUE_MESSAGES_MAX."""
OUTSIDER_UNSENT_BYTES_MAX = 4 * MIB
STRANGERS_MAX = PEERS_MAX
"""Connections to a master that have not registered, and no more than half of the descriptors that it may open."""
STRANGER_TIMEOUT_NS = 10 * SECOND
"""From a connection's acceptance to its registration."""
INFLOW_INTERVAL_NS = 20 * MS
"""How often a master looks at its connections."""
INFLOW_INTERVAL_PER_CONNECTION_NS = 50_000
"""Added for each of them: looking at one takes 2 us."""
HANDSHAKE_BYTES_MAX = 4 * KIB
HEARTBEAT_BYTES_PER_SECOND_MAX = 512
"""Of a connection: heartbeats of both sides at HEARTBEAT_TIMEOUT_MIN, encrypted, take 330."""
LOG_LINES_MAX = 2000
"""Lines of a master's log about peers in REFUSALS_LOGGED_INTERVAL; the rest is counted."""

HEARTBEAT_TIMEOUT_NS = 10 * SECOND
"""A silent host is noticed within this time."""
HEARTBEAT_TIMEOUT_MIN_NS = 1 * SECOND
"""Less leaves no room for DISCONNECT_GRACE and a heartbeat that a busy machine sends late."""
HEARTBEAT_INTERVAL_NS = 400 * MS
"""Below DISCONNECT_GRACE: when a master is cut off, it gives up its connections within one interval of each other, and
must not take the first for lost before it knows of the last."""
CUT_OFF_SPREAD_NS = 2 * SECOND
"""Members that are all lost within this time may not be gone: the master itself may have been cut off."""
DISCONNECT_GRACE_NS = 500 * MS
"""A peer whose control connection broke may come back for this long, unless others lost it too."""
RECONNECT_GRACE_HANDSHAKES = 8
"""A far peer may come back for so many times what connecting takes it. Without losses it takes 2: to hear that the
connection broke, the handshake (3 round trips, 4 with a secret), and Hello. With a round trip of 300 ms a SYN may be
lost twice, which costs 3 s, and later one segment. Where a handshake takes up to 60 ms it is DISCONNECT_GRACE."""
RECONNECT_GRACE_MAX_NS = 10 * SECOND
HANDSHAKE_MS_MAX = 60_000
"""The longest time to connect that a Hello may claim."""
REGISTRATION_TIMEOUT_NS = 5 * SECOND
"""From a connection's first byte to the answer of the master."""
CONNECT_TIMEOUT_NS = 3 * SECOND
"""One try to open a TCP connection."""
RECONNECT_INTERVAL_NS = 100 * MS
RECONNECT_INTERVAL_MAX_NS = 500 * MS
"""Well below RECOVERY_GRACE: peers are back before a master that takes over stops waiting for them."""
RECOVERY_GRACE_NS = 1 * SECOND
"""How long a new master waits for the reports of peers of an earlier one, from the first report on, and before it
admits the first peer of a new run, from its start on."""
TERM_STEP_MAX = 4096
"""The number of a master that takes over is higher than the last known one by a random step of this size at most."""
TERM_MAX = 2**30
"""Of a report: a message has room for 64 bits."""
EPOCH_BITS = 32
"""Epochs and attempts of a term begin at term << EPOCH_BITS."""
EPOCH_MAX = (TERM_MAX + TERM_STEP_MAX + 1) << EPOCH_BITS
ROUND_MAX = 2**62
"""Of a report; the next one must have room too."""
MASTERS_MAX = 3
"""Masters in the address list of a peer: with more, a peer might not get round to all of them within QUORUM_WAIT."""
MASTER_STAY_FIRST_NS = 4 * SECOND
"""How long a peer waits at the first master of its list until that one leads the run; then it tries the next."""
MASTER_STAY_NS = 2 * SECOND
"""The same, at each other master. Both are longer by a random part of MASTER_STAY_SPREAD, lest two peers miss each
other for ever, and one after the other shorter than QUORUM_WAIT."""
MASTER_STAY_SPREAD_NS = 500 * MS
QUORUM_WAIT_NS = 10 * SECOND
"""How long a master that took over waits for members that have not reported, where these may be at another master."""
RECOVERY_WAIT_NS = 4 * SECOND
"""How long a master that took over waits for members that have not reported."""
RUN_MEMORY_NS = 30 * SECOND
"""How long a master that stepped down begins no new run: members of the old one may only be cut off."""
MINORITY_WAIT_NS = 30 * SECOND
"""How long a master that comes back to a run with one address waits for a quorum of its members, before it goes on with
those who are there. The rest may have removed these, and hold a later revision."""
STRAGGLER_WARNING_NS = 10 * SECOND
"""A member whose vote others wait for is named in the log after this time, and again after twice, four times, ..."""
STRAGGLER_LINES_MAX = 8
"""Operations named in the log at a time; the rest is counted."""
STRAGGLER_TIMEOUT_MIN_NS = 1 * SECOND
MASTER_TIMEOUT_NS = 300 * SECOND
"""How long calls wait for a master that went away."""
WITHDRAW_TIMEOUT_NS = 2 * SECOND
"""How long an interrupted or timed-out call waits for the master's word on it. Then it ends without."""
PEER_LOOP_TIMEOUT_NS = 60 * SECOND
"""After WITHDRAW_TIMEOUT: the thread of the peer has hung if such a call has not ended by then."""
SIGNAL_CHECK_INTERVAL_NS = 1 * SECOND
"""How long a user's thread sleeps at a time: a signal that comes just before it sleeps is handled when it wakes."""
LINGER_MS = 500

# --- Metrics --------------------------------------------------------------------------------------------------------
METRICS_INTERVAL_NS = 250 * MS
"""A master publishes what can be seen of it no more often than this."""
METRICS_GROUPS_MAX = 64
"""Peer groups with a series of their own."""
METRICS_STRAGGLERS_MAX = 32
"""Peers that others wait for with a series of their own."""

# --- Secrets --------------------------------------------------------------------------------------------------------
SECRET_FILE_BYTES_MAX = 4 * KIB
ALLOWED_KEYS_MAX = 4096
"""Public keys in an allow list."""
REFUSALS_LOGGED_MAX = 100
"""Lines of the log about strangers in an interval; the rest is counted."""
REFUSALS_LOGGED_INTERVAL_NS = 60 * SECOND

# --- Links ----------------------------------------------------------------------------------------------------------
LINK_CONNECTIONS_DEFAULT = 4
"""Where the user names no number, and the path is short."""
LINK_FAR_ROUND_TRIP_NS = 25 * MS
"""A path is far from here on. Four connections with 1.5 MB under way each carry 2 Gbit/s over a shorter one."""
LINK_CONNECTIONS_FAR_BBR_DEFAULT = 16
"""The same over a far path, where the dialling host has BBR."""
LINK_CONNECTIONS_FAR_DEFAULT = 64
"""The same with a congestion control that takes losses for a full path, such as CUBIC: docs/adr/0017."""
LINK_CONNECTIONS_MAX = 64
LINK_SETUP_TIMEOUT_NS = 5 * SECOND
"""One try to set up all connections of a link, all candidate addresses together."""
LINK_RETRY_INTERVAL_NS = 200 * MS
LINK_RETRY_INTERVAL_MAX_NS = 2 * SECOND
LINK_WAIT_TIMEOUT_NS = 10 * SECOND
"""How long a plan waits for links where no order of the ring can do without them, and a joiner for its links."""
LINK_SUSPECT_NS = 60 * SECOND
"""How long a link by which an attempt failed is avoided where another order can do without it."""
LINK_FAILING_MAX_NS = 20 * SECOND
"""A link that has cost failed attempts so much time, and carried none to its end since, counts as down."""
UNEXPLAINED_STALL_MIN_NS = 5 * SECOND
"""An attempt that failed after so long, and nobody named a link, makes every link of its ring doubtful. Those that end
sooner lack a link that its ends are about to report, or were withdrawn."""
LINK_DOUBTS_MAX = 2
"""A link of so many such attempts in a row, one after the other, is avoided where another order can do without it."""
ABORTED_ATTEMPTS_KEPT_MAX = 16
"""Attempts that failed last: reports on them that were on their way still count against links."""
LINK_SUSPECTS_TRIED_MAX = 8
"""Where no order does without all suspected links: orders that are looked for with a few of them."""
DIRECT_PEERS_MAX = 128
"""More peers never exchange directly: a frame would be a few KiB, and every link of all pairs is needed."""
HOP_LATENCY_NS = 1 * MS
"""Of one hop of a small frame, until attempts have shown what it is."""
RING_BYTES_PER_SECOND = 1_000_000_000
"""That a peer sends while a ring moves a large tensor, until attempts have shown what it is."""
DIRECT_BYTES_PER_SECOND = 850_000_000
"""The same, while it is exchanged directly. Less, on one machine: its shares wait in memory."""
SPEED_TENSOR_BYTES = 4 * MIB
"""Smaller tensors say nothing of rates."""
QUANTIZED_DIRECT_PERCENT_MAX = 150
"""Of the time of a ring that a direct exchange of a quantised tensor may take: it is rounded fewer times."""
RING_EXACT_PEERS_MAX = 12
"""Up to so many peers an order of the ring is found wherever there is one: in 10 ms at most."""
RING_SEARCH_STEPS_MAX = 200_000
"""Links looked at in the search for an order of a larger ring."""
ADMISSION_WAIT_NS = 2 * SECOND
"""How long update_topology waits for joiners whose links are being set up."""
ADDRESS_STAGGER_NS = 50 * MS
"""Head start of each candidate address over the next."""
HANDSHAKES_MAX = 8 * LINK_CONNECTIONS_MAX
"""Incoming data connections whose handshake is not over: those of eight links of the largest kind, set up at once."""
LISTEN_BACKLOG = 512

# --- Data plane -----------------------------------------------------------------------------------------------------
ENGINE_THREADS_DEFAULT_MAX = 4
"""I/O threads where there are CPUs enough for them; one of them moves some 28 Gbit/s."""
ENGINE_THREAD_CPUS = 4
"""CPUs that this process may use for each I/O thread: the others are the trainer's and those of other peers."""
LOCAL_SENDERS_MAX = 1
"""Connections of a link within one host that are sent on at a time: more of them only compete for the cache."""
FRAME_BYTES_DEFAULT = 512 * KIB
FRAME_BYTES_MAX = 16 * MIB
SLOW_FRAME_BYTES = 64 * KIB
"""Between this and FRAME_BYTES_DEFAULT a frame is what a peer sends in FRAME_DURATION."""
FRAME_DURATION_NS = 2 * MS
"""A frame goes over one connection. Of 64 that share a path each takes 64 times as long for it, and an attempt ends
with the last one."""
STALL_TIMEOUT_NS = 10 * SECOND
"""An attempt that moves no byte for this long is given up."""
PATH_TIMEOUT_NS = 6 * SECOND
"""A link whose other end acknowledges nothing for this long is lost. Below STALL_TIMEOUT: the two ends of a broken path
then know of it before the rest of the ring only knows that nothing comes."""
DATA_MESSAGE_BYTES_MAX = 8 * MIB
"""One message on a data link (a block of state, with its header)."""
DATA_MESSAGES_QUEUED_BYTES_MAX = 64 * MIB
"""Received and not yet consumed, per engine; and sent and not yet written, per link."""
QUANTIZATION_BLOCK_ELEMENTS = 256
QUANTIZATION_BLOCK_ELEMENTS_MAX = 4096
"""The parameters of a block are 0.2% of it then; the engine accepts no larger ones (ZP__BLOCK_ELEMENTS_MAX)."""
ELEMENTS_MAX = 2**40

# --- Shared state ---------------------------------------------------------------------------------------------------
STATE_BLOCK_BYTES = 1 * MIB
"""What is digested, asked for and checked at a time. Larger ones are digested no faster: docs/shared_state.md."""
STATE_TENSOR_BYTES_MAX = DATA_MESSAGE_BYTES_MAX // 64 * STATE_BLOCK_BYTES
"""The digests of all blocks of a tensor fit into half a message."""
STATE_WORKERS_MAX = 16
"""Threads of one peer that digest state at a time."""
STATE_WORKER_BYTES = 2 * MIB
"""Work that is worth a thread: digested in the time that two threads take to start."""
STATE_RUN_BYTES_MAX = 32 * MIB
"""Work that a thread takes at a time."""
STATE_STAGING_BYTES = 4 * MIB
"""Page-locked memory that state of a device is copied by, twice for each thread that reads or writes."""
STATE_WINDOW_FIRST_BYTES = 4 * MIB
"""Asked of a source whose speed is not known yet."""
STATE_WINDOW_MIN_BYTES = 2 * MIB
STATE_WINDOW_BYTES_MAX = 32 * MIB
"""Asked of one source at a time: what a path of 1 Gbit/s and 250 ms carries."""
STATE_WINDOW_SLACK_NS = 20 * MS
"""A source is asked for so much more than its path holds, lest it waits for us."""
STATE_IN_FLIGHT_BYTES_MAX = 48 * MIB
"""Asked of all sources at a time. Below DATA_MESSAGES_QUEUED_BYTES_MAX, at which the frames of reduces wait too."""
STATE_REQUESTS_IN_FLIGHT_MAX = 4096
"""Blocks that one source is asked for at a time."""
STATE_REQUESTS_QUEUED_MAX = 2 * STATE_REQUESTS_IN_FLIGHT_MAX
"""Blocks that one fetcher may ask a source for and not have got yet; what it asks for beyond is not heard."""
STATE_RANGES_MAX = 8192
"""Ranges of blocks in one message."""
STATE_BATCH_BYTES = 256 * KIB
"""Small blocks travel together, up to this."""
STATE_SEND_QUEUE_BYTES_MAX = 32 * MIB
"""Blocks that wait in the link to one fetcher, or are on the way to it; more are not prepared."""
STATE_ANNOUNCE_INTERVAL_NS = 5 * MS
"""How often a fetcher tells its fellows what it has got, at most."""
STATE_STEAL_INTERVAL_NS = 20 * MS
"""How often a fetcher looks whether an idle source would be sooner than those that owe the rest."""
STATE_STEAL_MARGIN_NS = 20 * MS
"""It must be sooner by this, and twice as fast."""
STATE_STEAL_FIRST_NS = 500 * MS
"""What a source whose speed is not known is taken to need for a block."""
STATE_STAGING_CHUNK_BYTES = 64 * MIB
"""What was fetched waits for the commit in pieces of memory of this size."""
UPLOAD_LIMIT_MIN_BYTES = 1 * MIB
"""In a second. With less, those who wait for their turn would take a source for dead."""
OFFER_ANSWER_TIMEOUT_NS = 3 * SECOND
"""How long a joiner that fetches state ahead waits for links to members, and for what they offer."""
PREFETCH_TIMEOUT_NS = 600 * SECOND
"""How long it fetches, where the user names no time."""
STATE_STALL_TIMEOUT_NS = 30 * SECOND
"""A transfer in which no block arrives for this long is given up."""
STATE_SOURCE_TIMEOUT_NS = 8 * SECOND
"""A source that sends no block for this long is left for another, where there is one. Above PATH_TIMEOUT: one that
waits itself for its source then knows of it first."""

# --- Checkpoints ----------------------------------------------------------------------------------------------------
CHECKPOINT_PIECE_BYTES = 1 * MIB
"""Of a tensor; what is read or written and digested at a time, while it is in the cache of a CPU."""

# --- Progress -------------------------------------------------------------------------------------------------------
PROGRESS_INTERVAL_NS = 100 * MS
"""Between two calls of a callback."""
PROGRESS_LOG_INTERVAL_NS = 1 * SECOND
"""Between two lines in the log; transfers that take less leave none."""
PROGRESS_WINDOW_NS = 4 * SECOND
"""What the rate is measured over."""


# --- Limits that follow from others ---------------------------------------------------------------------------------
def calls_in_flight_max(member_count: int) -> int:
    """How many calls without an answer a peer may have in a group of so many members.

    A peer reports all its attempts and remembers as many that have ended, each with the calls of all who take part. So
    that a report fits into a message, the product of calls and members is bounded.
    """
    return min(CALLS_IN_FLIGHT_MAX, CALLS_NAMED_MAX // max(member_count, 1))
