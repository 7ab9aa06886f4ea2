"""Every bound, timeout and default of zpccl, with the unit in its name."""

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
NAMES_LOOKED_UP_MAX = 32
"""Names of peers that are being looked up, each by a thread. A silent name server holds up each for a minute."""
ADDRESS_CHARS_MAX = 270
"""Fits a host name of 253 characters, brackets, a zone and a port."""

# --- Control plane --------------------------------------------------------------------------------------------------
PROTOCOL_VERSION = 30
MESSAGE_BYTES_MAX = 12 * MIB
"""One control message. libzmq drops the connection of a sender that exceeds it."""
CONTROL_QUEUE_MESSAGES_MAX = 10_000
"""Send high-water mark of a control connection."""
REPORT_PLAIN_BYTES_MAX = 4 * KIB
"""A RunReport with more bytes is compressed: with 64 peers, to a twentieth."""
REPORT_PARTS_KEPT_MAX = 4
"""Member lists, and sequences of decisions, of the last reports."""
REPORT_PART_KEPT_BYTES_MAX = 512 * KIB
"""Such a part. Decoded it takes up to forty times as many bytes."""
MESSAGE_PARTS_MAX = 64
"""Control messages sent together, as parts of one ZeroMQ message: waking ZeroMQ's thread costs more than the rest."""
SEND_HOLD_NS = 5 * MS
"""How long a message that nobody waits for is held back, so that it is sent with the next one."""
SEND_HELD_MAX = 8
"""At this many, held messages are sent. A call makes two of them at a peer and one at the master. Plans ahead depend on
them."""
CONTROL_BATCH_BYTES_MAX = 1 * MIB
"""Bytes of messages that a master receives before it handles them."""
PEERS_MAX = 2048
"""Members and pending peers of one run."""
PENDING_PEERS_MAX = 256
HOST_PEERS_MAX = 64
"""Peers of one host that are admitted and removed together."""
CALLS_IN_FLIGHT_MAX = 1024
"""Unanswered calls of one peer in a small group; see calls_in_flight_max."""
CALLS_NAMED_MAX = 65_536
"""Bound on (calls in flight of one peer) x (members of its group): a report names the calls of all members."""
COMMIT_PEERS_MAX = 32
"""Up to this many participants of an attempt send each other the digests of their results. More wait for the master."""
DIGESTS_KEPT_MAX = 1024
"""Attempts for which a peer keeps the digest of one other participant. Without a digest it waits for the master."""
CALLS_UNDECIDED_MAX = 64
"""Calls that may return before the master's decision on them has come. Further calls wait for the master."""
ANSWERS_KEPT_MAX = 4 * CALLS_IN_FLIGHT_MAX
"""Answers that the master keeps for a peer that does not acknowledge them. A broken connection can lose only the
answers to calls in flight, so at most the latest CALLS_IN_FLIGHT_MAX of them are needed."""
PARTIAL_REFUSALS_KEPT_MAX = 8
"""Remembered refusals that do not concern exactly one whole group, but some of its members, or other groups too."""
OUTCOMES_KEPT_MAX = CALLS_IN_FLIGHT_MAX + CALLS_UNDECIDED_MAX + PARTIAL_REFUSALS_KEPT_MAX
"""Decisions in a report. The number that a peer remembers follows from the size of its group (memory.py)."""
OUTCOME_CALLS_KEPT_MAX = (
    CALLS_NAMED_MAX + CALLS_UNDECIDED_MAX * COMMIT_PEERS_MAX + PARTIAL_REFUSALS_KEPT_MAX * PEERS_MAX
)
"""Calls named in all decisions that a peer remembers."""
OUTCOME_TEXT_CHARS_MAX = 400
"""Length to which reasons in remembered decisions are cut."""
MISMATCH_VALUES_MAX = 4
"""Values listed in a CollectiveMismatch; the rest is counted. Remembered decisions contain these values, too."""
MISMATCH_VALUE_BYTES_MAX = 200
"""Text of one such value, with the peers that passed it."""
SPECS_PER_MESSAGE_MAX = 1024
SMALL_TENSOR_BYTES = 64 * KIB
"""Voting on a smaller tensor takes longer than reducing it, so `max_in_flight` does not count it."""
NAME_CHARS_MAX = 128
KEY_CHARS_MAX = 1024
STATE_ENTRIES_MAX = 65_536
EXPLAINED_PEERS_MAX = 16
"""Peers named in one log line about a sync; the rest is counted."""
STATE_ENTRY_BYTES_MAX = 64
"""Size of a state entry in a message, without its key."""
REPORT_CONTENTS_BYTES_MAX = 256 * KIB
"""Contents of a sync in a run report. A peer with more reports none, so it is not named to newcomers as a partial
seed."""
TEXT_CHARS_MAX = 4096
"""Length of a human-readable text in a message; longer reasons are cut."""
MALFORMED_TEXT_CHARS_MAX = 400
"""Length of the description of a malformed message: it may be hostile and goes to the log."""
TAG_MAX = 2**64 - 1
PEER_GROUP_MAX = 2**32 - 1
REVISION_MAX = 2**63 - 1
POLL_EVENTS_MAX = 256
"""Messages that a loop takes from one socket before it serves the others."""
ENGINE_MESSAGES_TAKEN_MAX = 64
"""Digests and messages about offers that a peer takes in one turn, which takes 1 ms. A hostile peer may send millions.
"""
PARTS_TAKEN_MAX = 512
"""Message parts that a master takes in one turn, which takes 15 ms if they are messages of strangers, and 1 ms if they
are empty. A hostile message may have millions."""
REPORTS_DECODING_NS = 50 * MS
"""After this time spent on compressed reports, a master decodes no other one in that turn. One takes 2 ms; a hostile
one, up to half a second."""
LONG_ANSWERS_TAKEN_MAX = 32
"""Messages with a long answer that a master takes in one turn. A Hello of 120 bytes is answered with all neighbours:
in a group of 250 hostile peers with long addresses, these take 0.6 MB and 1 ms."""
DRAIN_TURNS_MAX = 16
"""Turns in a row in which a master takes messages because connections have closed, before it handles any of them."""
CONNECTIONS_UNCOUNTED_MAX = 65_536
"""Connections that libzmq may have numbered before a master has counted them. libzmq waits at some 2,000 events."""
CLOSED_CONNECTIONS_MAX = 16 * PEERS_MAX
"""Closed connections that a master remembers because libzmq may still hold their messages; 200 bytes each."""
MEMBER_BYTES_MAX = MESSAGE_BYTES_MAX + MIB
"""Bytes from a member that libzmq still holds: the master has not taken them as a message."""
PENDING_BYTES_MAX = 256 * KIB
"""The same for a pending peer."""
STRANGER_BYTES_MAX = 32 * KIB
"""Bytes that a connection may send to a master before it has registered; a Hello has at most 3 KiB."""
OUTSIDERS_BYTES_MAX = 8 * MIB
"""Bytes that libzmq holds for all strangers and pending peers. Empty message parts take 32 times as much memory."""
CLOSED_STRANGERS_MAX = OUTSIDERS_BYTES_MAX // STRANGER_BYTES_MAX
"""Unregistered connections that may close before a master has read all their bytes; then it accepts no others."""
CONNECTIONS_BYTES_MAX = 128 * MIB
"""Bytes that libzmq holds for all connections to a master."""
MEMBER_UNSENT_BYTES_MAX = 64 * MIB
"""Bytes that wait to be sent to a member. CONTROL_QUEUE_MESSAGES_MAX applies, too."""
OUTSIDER_UNSENT_BYTES_MAX = 4 * MIB
"""The same for a pending peer or a stranger."""
STRANGERS_MAX = PEERS_MAX
"""Unregistered connections to a master, which also take at most half of the file descriptors that it may open."""
STRANGER_TIMEOUT_NS = 10 * SECOND
"""Time from the acceptance of a connection to its registration."""
INFLOW_INTERVAL_NS = 20 * MS
"""Interval at which a master checks its connections."""
INFLOW_INTERVAL_PER_CONNECTION_NS = 50_000
"""Added to INFLOW_INTERVAL for each connection: checking one takes 2 us."""
FREE_DESCRIPTORS_COUNT = 32
"""Descriptors that must be free when a peer or a master starts: each needs up to 20, without its connections."""
HANDSHAKE_BYTES_MAX = 4 * KIB
HEARTBEAT_BYTES_PER_SECOND_MAX = 512
"""On one connection: encrypted heartbeats of both sides at HEARTBEAT_TIMEOUT_MIN take 330."""
PEER_SILENCE_NS = 60 * SECOND
"""A peer that sent no message for this long sends an empty one. Bytes before it were heartbeats and do not count."""
LOG_LINES_MAX = 2000
"""Log lines of a master, or a member, about its peers per REFUSALS_LOGGED_INTERVAL; the rest is counted. Half are for
warnings and errors."""
LOG_WAIT_NS = 100 * MS
"""How long a thread waits to write a line while another one writes, which takes no time, or was interrupted by a signal
handler that waits in turn."""

HEARTBEAT_TIMEOUT_NS = 10 * SECOND
"""A silent host is noticed within this time."""
HEARTBEAT_TIMEOUT_MIN_NS = 1 * SECOND
"""It must exceed DISCONNECT_GRACE plus the delay of a heartbeat on a busy machine."""
HEARTBEAT_TIMEOUT_MAX_NS = 120 * SECOND
"""Longest heartbeat timeout of a master. Less than PEER_LOOP_TIMEOUT, as a call that is given up may wait until the
master notices a silent host."""
HEARTBEAT_INTERVAL_NS = 400 * MS
"""Below DISCONNECT_GRACE: a master that is cut off loses its connections within one interval, and must not treat the
first peer as lost before it has noticed the last loss."""
CUT_OFF_SPREAD_NS = 2 * SECOND
"""If the master loses all members within this time, it may itself have been cut off. A connection and a link that break
within this time may have one cause."""
DISCONNECT_GRACE_NS = 500 * MS
"""Time in which a peer may reconnect after its control connection broke, unless other peers lost their links to it."""
RECONNECT_GRACE_HANDSHAKES = 8
"""The same for a far peer, as a multiple of its time to connect. Without packet loss the peer needs 2: to notice the
break, for the handshake (3 round trips, 4 with a secret), and for Hello. At a round trip of 300 ms this allows for two
lost SYNs, which cost 3 s, and one later lost segment. For a handshake of at most 60 ms, DISCONNECT_GRACE applies."""
RECONNECT_GRACE_MAX_NS = 10 * SECOND
HANDSHAKE_MS_MAX = 60_000
"""The longest time to connect that a Hello may claim."""
REGISTRATION_TIMEOUT_NS = 5 * SECOND
"""Time from the first byte of a connection to the master's answer."""
CONNECT_TIMEOUT_NS = 3 * SECOND
"""One attempt to open a TCP connection."""
RECONNECT_INTERVAL_NS = 100 * MS
RECONNECT_INTERVAL_MAX_NS = 500 * MS
"""Well below RECOVERY_GRACE: peers reconnect before a new master stops waiting for them."""
RECOVERY_GRACE_NS = 1 * SECOND
"""How long a new master waits for reports of peers of its predecessor, counted from the first report; and how long
after its start it waits before it admits the first peer of a new run."""
LATE_TICK_NS = 200 * MS
"""If a master or a peer gets a Tick this late, its process was stopped, and messages that came meanwhile may not have
been read yet. A busy machine may delay a Tick by some milliseconds."""
TERM_STEP_MAX = 4096
"""A new master adds a random step of at most this size to the highest term it knows."""
TERM_MAX = 2**30
"""Highest term in a report: epochs must fit into the 64 bits of a message field."""
EPOCH_BITS = 32
"""Epochs and attempt ids of a term begin at term << EPOCH_BITS."""
EPOCH_MAX = (TERM_MAX + TERM_STEP_MAX + 1) << EPOCH_BITS
ROUND_MAX = 2**62
"""Highest value in a report; the next one must still fit into 64 bits."""
MASTERS_MAX = 3
"""Masters in the address list of a peer: with more, it might not try all of them within QUORUM_WAIT."""
MASTER_STAY_FIRST_NS = 4 * SECOND
"""How long a peer waits for the first master of its list to lead the run, before it tries the next."""
MASTER_STAY_NS = 2 * SECOND
"""The same for each other master. A random part of MASTER_STAY_SPREAD is added to both, so that two peers cannot miss
each other for ever. Their sum over all masters is below QUORUM_WAIT."""
MASTER_STAY_SPREAD_NS = 500 * MS
HOST_WAIT_NS = 10 * SECOND
"""How long pending peers wait for the others of their host at a master that is not the first of their list. The time
differs by peer and may be twice as long, so that peers do not move around the masters in step."""
HOST_TIMEOUT_NS = 600 * SECOND
"""How long a peer waits for admission, at all masters together, while some peers of its host have not registered. The
processes of a host start together, and one that died is started again within this time or not at all."""
HOST_NAMESAKE_WAIT_NS = HEARTBEAT_TIMEOUT_MAX_NS + 30 * SECOND
"""How long pending peers wait while a host with the name of theirs has all its peers in the run. If those are former
processes of the host, the master has noticed by then that they are gone, whatever its heartbeat timeout."""
QUORUM_WAIT_NS = 10 * SECOND
"""How long a new master waits for missing reports, if members may be connected to another master."""
CUT_OFF_WAIT_NS = QUORUM_WAIT_NS + HEARTBEAT_TIMEOUT_NS
"""The same for a member to which others have links: its master may not know yet that it is cut off from the others."""
RECOVERY_WAIT_NS = 4 * SECOND
"""How long a new master waits for missing reports."""
LEAVE_WAIT_NS = 3 * SECOND
"""How long `close()` waits for a master that leads, if there are several: without its Leave the others would wait for
this peer for QUORUM_WAIT. A take-over near by takes a fifth of a second, over round trips of 300 ms two to four."""
RUN_MEMORY_NS = 30 * SECOND
"""How long a master that stepped down begins no new run: the members of the old run may only be cut off."""
MINORITY_WAIT_NS = 30 * SECOND
"""How long a restarted master of a run with one address waits for a quorum before it goes on with the connected
members. The other members may have removed these, and hold a later revision."""
EXPECTED_TIMEOUT_NS = MINORITY_WAIT_NS + STRANGER_TIMEOUT_NS
"""Like STRANGER_TIMEOUT, for a peer that is to report: it may wait for the master to go on with the run."""
PLANS_AHEAD_MAX = 1024
"""Tags with plans ahead, handed out by a master or kept by a peer. The oldest are dropped. Also the number of attempts
that a peer remembers because others ended them, until their plans come."""
PLANS_AHEAD_AT_TAG_MAX = 16
"""Plans ahead for one tag: the peers can make this many calls before the master hears of the first."""
PLAN_AHEAD_AGE_MAX = 32_768
"""A peer drops a plan ahead when it has started, or dropped, an attempt with an id higher by this. For an attempt that
is 65,536 ids back, the data plane takes frames that come before the attempt begins for late frames, and drops them."""
PLAN_AHEAD_BYTES_MAX = 16 * MIB
"""Larger tensors are not planned ahead: asking the master is short compared with their transfer, and if another plan
comes after all, a peer that began early has to restore its input."""
PLAN_AHEAD_SMALL_BYTES = 256 * KIB
"""A tensor up to this size is sent before the receiver has begun (ZP__EAGER_TENSOR_BYTES), so it counts below."""
PLANS_AHEAD_BYTES_MAX = 24 * MIB
"""Bytes of such tensors, times receivers, that a peer sends in calls that it has started ahead and that have not ended.
A receiver that makes other calls first keeps them. Half of DATA_MESSAGES_QUEUED_BYTES_MAX may be taken by frames of
larger tensors (early.c), and the rest also has to hold other messages. Further calls wait for their plans."""
PLAN_AHEAD_CHARGE_BYTES = 4 * KIB
"""A smaller tensor counts as this many bytes (ZP__EARLY_CHARGE_MIN)."""
STRAGGLER_WARNING_NS = 10 * SECOND
"""The log names a member whose vote others wait for after this time, and again after twice, four times, ... this."""
STRAGGLER_LINES_MAX = 8
"""Operations named in the log at the same time; the rest is counted."""
STRAGGLER_TIMEOUT_MIN_NS = 1 * SECOND
GIVEN_TIME_MAX_NS = 86_400 * SECOND
"""The longest time that users may give, except for `timeout=` of a call."""
MASTER_TIMEOUT_NS = 300 * SECOND
"""How long calls wait for an unreachable master."""
WITHDRAW_TIMEOUT_NS = 2 * SECOND
"""How long an interrupted or timed-out call waits for the master's decision; then it ends without one."""
PEER_LOOP_TIMEOUT_NS = 150 * SECOND
"""If such a call has not ended this long after WITHDRAW_TIMEOUT, the thread of the peer hangs."""
SIGNAL_CHECK_INTERVAL_NS = 1 * SECOND
"""Longest sleep of a user's thread: it handles a signal that arrives just before it sleeps when it wakes up."""
LINGER_MS = 500

# --- Metrics --------------------------------------------------------------------------------------------------------
METRICS_INTERVAL_NS = 250 * MS
"""Shortest time between two snapshots of a master."""
METRICS_CONNECTIONS_MAX = 16
"""Connections to the metrics of a master that are open at the same time, each with a thread."""
METRICS_SILENCE_NS = 10 * SECOND
"""How long such a connection may send nothing."""
METRICS_RETRY_NS = 100 * MS
"""Pause before the metrics server accepts again, if it could not: the process has no descriptor left."""
METRICS_GROUPS_MAX = 64
"""Peer groups that have their own time series."""
METRICS_STRAGGLERS_MAX = 32
"""Stragglers that have their own time series."""
METRICS_PATHS_MAX = 256
"""Paths between peers that have their own time series: the slowest."""

# --- Secrets --------------------------------------------------------------------------------------------------------
SECRET_FILE_BYTES_MAX = 4 * KIB
ALLOWED_KEYS_MAX = 4096
"""Public keys in an allow list."""
REFUSALS_LOGGED_MAX = 100
"""Log lines about strangers per REFUSALS_LOGGED_INTERVAL; the rest is counted."""
REFUSALS_LOGGED_INTERVAL_NS = 60 * SECOND

# --- Checks of a host -----------------------------------------------------------------------------------------------
DIAL_BACKS_MAX = 16
"""Dials of a master at the request of hosts that are in progress or less than DIAL_BACK_INTERVAL ago."""
DIAL_BACK_INTERVAL_NS = 1 * SECOND
"""Shortest time between two dials of a master to the same address."""
DIAL_BACK_TIMEOUT_NS = 3 * SECOND
"""How long a dial takes at most, and how long a host waits for it."""
ROUTE_MTU_BYTES = 1280
"""A path with a smaller MTU gets a warning. This is the minimum MTU of IPv6, which tunnels have, too."""
TCP_BUFFER_BYTES = 4 * MIB
"""A far connection is slow if the largest buffer that TCP may use is smaller. Linux: 4 MiB to send, 6 to receive."""
OPEN_FILES_COUNT = 4096
"""Open files that a peer should be allowed: 64 connections to each of 60 far peers."""
CLOCK_DIFFERENCE_MAX_NS = 1 * SECOND
"""Difference between the clocks of two hosts that gets a warning, for people who compare logs. The protocol compares no
clocks."""
CHECK_TIMEOUT_NS = 6 * SECOND
"""How long a host check waits for a master's answer: to connect, and to be admitted."""

# --- Links ----------------------------------------------------------------------------------------------------------
LINK_CONNECTIONS_DEFAULT = 4
"""Connections of a link over a short path, unless the user sets a number."""
LINK_FAR_ROUND_TRIP_NS = 25 * MS
"""From this round-trip time on a path is far. Below it, four connections with 1.5 MB in flight each carry 2 Gbit/s."""
LINK_CONNECTIONS_FAR_BBR_DEFAULT = 16
"""The same over a far path, if the dialling host uses BBR."""
LINK_CONNECTIONS_FAR_DEFAULT = 64
"""The same with a loss-based congestion control such as CUBIC: docs/adr/0017."""
LINK_CONNECTIONS_MAX = 128
"""Connections that such a link gets if they lose packets while no queue of the path is full: docs/adr/0017."""
LINK_ROOM_QUEUE_PERCENT_MAX = 25
"""A path has room if packets wait in its queues for at most this percentage of its round trip. It is 60 and more on
lossless paths that CUBIC fills, and 5 to 19 on paths that are limited by losses."""
LINK_SENDER_WINDOW_BYTES = 8 * KIB
"""A link sends on the least number of connections of which each has at most this much in flight. CUBIC has more in
flight at one lost packet in 50, so losses alone leave no connection unused."""
LINK_SENDER_WINDOW_BBR_BYTES = 64 * KIB
"""The same with BBR, which has more in flight whatever is lost."""
LINK_SENDER_ROUND_TRIP_NS = 10 * MS
"""The least round trip in this calculation: near by, a path of more than 200 Mbit/s is used by all connections."""
LINK_SENDER_ROUND_TRIP_COUNT = 20
"""A path must be the limit for this many round trips before connections are left unused: a small tensor may be slow
only because its last packet was lost."""
LINK_SETUP_TIMEOUT_NS = 5 * SECOND
"""One attempt to set up all connections of a link, over all candidate addresses."""
LINK_RETRY_INTERVAL_NS = 200 * MS
LINK_RETRY_INTERVAL_MAX_NS = 2 * SECOND
LINK_WAIT_TIMEOUT_NS = 10 * SECOND
"""How long a plan waits for links if none is possible without them, and how long a joiner waits for its links."""
AWAY_EXCUSE_MAX_NS = 60 * SECOND
"""How long members that are cut off, joiners and stragglers stay because a member was away during each wait, and may
have links or votes that the master has not heard of; also how long joiners stay because new links come up."""
LINK_SUSPECT_NS = 60 * SECOND
"""How long a link that failed an attempt is avoided, if a ring exists without it."""
LINK_FAILING_MAX_NS = 20 * SECOND
"""A link counts as down once failed attempts on it have taken this long in total, without a success since."""
LINK_FAILING_SYNCS_MAX_NS = 2 * LINK_FAILING_MAX_NS
"""Syncs use a link that counts as down until it has taken this long. A long fetch may fail twice and then succeed."""
UNEXPLAINED_STALL_MIN_NS = 5 * SECOND
"""If an attempt fails after at least this time and no peer reports a link, every link of its ring becomes doubtful.
Attempts that fail sooner lack a link that its ends are about to report, or were withdrawn."""
LINK_DOUBTS_MAX = 2
"""A link that was in this many such attempts in a row is avoided, if a ring exists without it."""
ABORTED_ATTEMPTS_KEPT_MAX = 16
"""Recently failed attempts that are remembered, so that late reports on them still count against links."""
LINK_SUSPECTS_TRIED_MAX = 8
"""If no ring exists without all suspected links, at most this many are allowed again one by one, then all."""
ONE_SHOT_BYTES_MAX = 64 * KIB
"""Bytes that a peer may send, and receive, in a one-shot exchange: its tensor, once for each of the others."""
DIRECT_PEERS_MAX = 128
"""Maximum for the direct exchange: with more peers a frame would be a few KiB, and all pairs need a link."""
HOP_LATENCY_NS = 1 * MS
"""Estimated latency of one hop of a small frame, until attempts have measured it."""
HOP_WORK_NS = 100 * US
"""The same beyond half a round trip, where the round trip of the path is known."""
RING_BYTES_PER_SECOND = 1_000_000_000
"""Estimated send rate of a peer in a ring, until attempts have measured it."""
DIRECT_BYTES_PER_SECOND = 850_000_000
"""The same in a direct exchange. On one machine it is lower, because shares are buffered in memory."""
SPEED_TENSOR_BYTES = 4 * MIB
"""Attempts with smaller tensors do not update the measured rates."""
PATHS_SAMPLED_MAX = 128
"""Paths in one report of a peer."""
PATHS_TOLD_MAX = 32_768
"""Paths in a master's answer about its measurements, the latest first: all pairs of 181 peers. More peers use rings,
which have a path for each peer."""
RATE_TOLD_MAX = 2**50
"""Highest rate in such an answer, in bytes per second. A rate that a peer reports has no bound."""
MEASUREMENTS_KEPT_NS = 1 * SECOND
"""How long a master repeats the same answer: collecting the measurements of 128 peers takes 15 ms."""
TOPOLOGY_TIMEOUT_NS = 10 * SECOND
"""How long topology() waits for the master, by default."""
TOPOLOGY_MATRIX_PEERS_MAX = 12
"""A topology of more peers is printed as a list of its slowest paths."""
TOPOLOGY_LINES_MAX = 20
"""Paths, and links, in a printed topology; the rest is counted."""
QUANTIZED_DIRECT_PERCENT_MAX = 150
"""A direct exchange of a quantised tensor may take this percentage of the ring's time: it rounds fewer times."""
RING_EXACT_PEERS_MAX = 12
"""With at most this many peers the search finds a ring whenever one exists, within 10 ms."""
RING_SEARCH_STEPS_MAX = 200_000
"""Links examined in the search for a larger ring."""
RING_LEVEL_STEPS_MAX = 10_000
"""The same in a search for a ring whose slowest path has a certain rate; there are some ten such searches."""
RING_PASSES_MAX = 8
"""Passes over a ring to shorten it: each pass compares each pair of its paths with two others in their place."""
LANES_MAX = 32
"""Trees among which a tensor is divided. A star has one peer in its middle, so there may be one star for each peer."""
LANE_PARENTS_MAX = LANES_MAX * DIRECT_PEERS_MAX
"""Parents named in all lanes of a plan; stars name none."""
LANE_SHARE_MAX = 2**20
"""The weights of lanes are integers up to this."""
ROUTE_KEPT_NS = 500 * MS
"""Measurements of paths change the plans of a group, for one size of tensors, after this time at the earliest."""
ROUTES_KEPT_MAX = 256
"""Sizes of tensors, in all groups, for which a master keeps the plan. Other sizes are planned anew for each call."""
LANE_MIN_BYTES = 64 * KIB
"""A lane has at least a frame of the tensor, on average: smaller tensors have fewer lanes."""
PACKING_PIVOTS_MAX = 400
"""Steps of the search for shares of trees or stars; that takes some 10 ms."""
ROUTE_GAIN_MIN_PERCENT = 10
"""How much faster a plan that follows the rates of paths must be than an algorithm that treats all paths alike."""
ROUTE_CHANGE_MIN_PERCENT = 15
"""How much faster another plan must be than the present one: measured rates vary."""
RATE_SAMPLE_BYTES = 256 * KIB
"""A link that carried at least this much in an attempt shows the rate of its path; less is neither reported nor
counted."""
RATE_SAMPLE_ROUND_TRIP_COUNT = 4
"""The transfer must also take this many round trips; otherwise it shows a lower bound of the rate."""
RATE_DOUBLING_NS = 3600 * SECOND
"""A rate that is not measured again counts double after this time, so that slow paths are tried again."""
PROBE_NS = 1 * SECOND
"""How long a round of optimize_topology sends in which each peer has one other."""
PROBE_HOST_NS = 3 * SECOND
"""The same for a round in which a host sends to all others. With one second less, rates were twice as far off."""
PROBE_RAMP_NS = 1 * SECOND
"""How long the windows of TCP open in a round, at most: half of a short round. What moves before does not count."""
PROBE_BYTES_MAX = 64 * MIB
"""Or until the other ends have this much. Also the bound on what is queued, over all links."""
PROBE_SAMPLE_NS = 50 * MS
"""How often it reads TCP's counters."""
PROBE_READ_NS = 5 * MS
"""If reading them takes longer, the thread has waited for a processor, and it is not known when they were read,"""
PROBE_READ_ATTEMPTS_MAX = 3
"""so they are read again, so often at most."""
PROBE_QUEUED_BYTES = 64 * KIB
"""Bytes that it queues for a link at first: a burst would make slow paths lose much."""
PROBE_QUEUE_NS = 50 * MS
"""Later it queues as much more as a link seems to carry in this time,"""
PROBE_QUEUE_ROUND_TRIP_COUNT = 3
"""and in this many round trips."""
PROBE_MESSAGE_BYTES = 16 * KIB
"""Size of its messages."""
PROBE_HOST_ROUNDS_MAX = 16
"""Rounds in which hosts send to all others. In a larger group several do at the same time."""
PROBE_TRUST_PERCENT_MAX = 200
"""What was measured on purpose holds for RATE_DOUBLING, unless attempts take more than this percentage of what their
plans say."""
PROBE_DOUBT_PERCENT = 50
"""In such an attempt only paths are doubted that were busy for this percentage of its time: others waited for them."""
PATH_USED_PERCENT = 80
"""A plan uses this percentage of a path that was measured on purpose and has not fallen since, so that a link that fell
behind can catch up."""
HOST_USED_PERCENT = 98
"""The same for a host. It was measured while it only sent; if it also receives, it sends acknowledgements, too."""
PACE_HELD_PERCENT = 103
"""An attempt that takes less than this percentage of its pace was perhaps held back by it: the next one is faster."""
HOST_LIMITED_PERCENT_MAX = 80
"""If the links of a host together reach less than this percentage of their rates, the host is the limit."""
EXPLAINED_MIN_PERCENT = 75
"""If the network explains this percentage of an attempt's time, the attempt can only raise the estimated rate of its
algorithm."""
ADMISSION_WAIT_NS = 2 * SECOND
"""How long update_topology waits for joiners whose links are being set up."""
ADDRESS_STAGGER_NS = 250 * MS
"""Head start of a peer's likely address over its others, which are then dialled at the same time (RFC 8305)."""
OPEN_TOGETHER_DELAY_NS = 500 * MS
"""How long after the normal dial a peer dials from its listening port, for two peers behind NATs. Such a link has only
one connection."""
DIAL_HEAD_START_NS = 500 * MS
"""Head start of the end of a link that dials first over the other end."""
LINK_PADDING_BYTES = 4 * KIB
"""Sent with the handshake of a link, in both directions, so that no link comes up on a path that loses large packets:
more than a packet of 1,500 bytes carries. A path of 56 kbit/s takes it in 0.6 s."""
HANDSHAKES_MAX = 8 * LINK_CONNECTIONS_FAR_DEFAULT
"""Incoming data connections in their handshake: enough for eight links of the largest kind at the same time. Those that
have not yet proved to come from a neighbour also take at most a quarter of the file descriptors."""
HANDSHAKES_OF_ADDRESS_MAX = HANDSHAKES_MAX // 2
"""Of those, the connections from one address that are not known to come from a neighbour."""
OUTSIDER_DIALS_MAX = 4
"""Peers that are no members which a member dials at a time, each with up to 64 connections."""
HELLO_TIMEOUT_NS = 2 * SECOND
"""How long an accepted data connection may send nothing: its first message is in flight when it is accepted."""
LISTEN_BACKLOG = 512

# --- Data plane -----------------------------------------------------------------------------------------------------
ENGINE_THREADS_DEFAULT_MAX = 4
"""Maximum number of I/O threads; one thread moves some 28 Gbit/s."""
ENGINE_THREAD_CPUS = 4
"""One I/O thread per this many CPUs of the process: the training and other peers need the rest."""
LOCAL_SENDERS_MAX = 1
"""Connections of a link within one host that send at the same time. More would only compete for the cache."""
FRAME_BYTES_DEFAULT = 512 * KIB
FRAME_BYTES_MAX = 16 * MIB
SLOW_FRAME_BYTES = 16 * KIB
"""A frame has the bytes that a peer sends in FRAME_DURATION, but at least this and at most FRAME_BYTES_DEFAULT."""
FRAME_DURATION_NS = 2 * MS
"""A frame travels on one connection. If 64 connections share a path, each needs 64 times as long, and an attempt ends
with the last frame."""
STALL_TIMEOUT_NS = 10 * SECOND
"""An attempt that completes no frame for this long fails, and a message that stops for this long ends its link."""
PATH_TIMEOUT_NS = 6 * SECOND
"""A link whose other end acknowledges nothing for this long is lost. Below STALL_TIMEOUT, so that the two ends of a
broken path report it before the rest of the ring stalls."""
WITNESS_AFTER_NS = PATH_TIMEOUT_NS + 2 * CUT_OFF_SPREAD_NS
"""If a peer disconnects within this time after it or another member has reconnected or reported to a new master, a lost
link between the two does not show that it is lost: the link may have broken before, and be noticed only now."""
DATA_MESSAGE_BYTES_MAX = 8 * MIB
"""One message on a data link (a block of state, with its header)."""
DATA_MESSAGES_QUEUED_BYTES_MAX = 64 * MIB
"""Bound per engine on received messages that are not released; at the bound the links share it equally. Also the bound
per link on sent messages that are queued or not acknowledged."""
QUANTIZATION_BLOCK_ELEMENTS = 256
QUANTIZATION_BLOCK_ELEMENTS_MAX = 4096
"""At this size the parameters are 0.2% of a block. Equals ZP__BLOCK_ELEMENTS_MAX of the engine."""
QUANTIZATION_PARAMETER_BYTES_MAX = 16
"""The parameters of a block: at most two doubles."""
WIDE_SUM_FACTOR_MAX = 4
"""For the AVG of 8-bit integers, 32-bit sums travel around a ring (zp__wide_itemsize)."""
ELEMENTS_MAX = 2**40

# --- Shared state ---------------------------------------------------------------------------------------------------
STATE_BLOCK_BYTES = 1 * MIB
"""Unit of digests, requests and checks. Larger blocks are digested no faster: docs/shared_state.md."""
STATE_TENSOR_BYTES_MAX = DATA_MESSAGE_BYTES_MAX // 64 * STATE_BLOCK_BYTES
"""The digests of all blocks of such a tensor fit into half a message."""
STATE_WORKERS_MAX = 16
"""Threads of one peer that digest state at the same time."""
STATE_WORKER_BYTES = 2 * MIB
"""Amount of work that justifies another thread: digesting it takes as long as starting two threads."""
STATE_RUN_BYTES_MAX = 32 * MIB
"""Amount of work in one task of a thread."""
STATE_STAGING_BYTES = 4 * MIB
"""Size of a page-locked buffer for copying state from or to a device; each reading or writing thread has two."""
STATE_WINDOW_FIRST_BYTES = 4 * MIB
"""Request window of a source whose rate is not measured yet."""
STATE_WINDOW_MIN_BYTES = 2 * MIB
STATE_WINDOW_BYTES_MAX = 32 * MIB
"""Largest request window of one source: the bandwidth-delay product of 1 Gbit/s and 250 ms."""
STATE_WINDOW_SLACK_NS = 20 * MS
"""The window exceeds the bandwidth-delay product by this time at the measured rate, so that a source never idles."""
STATE_IN_FLIGHT_FIRST_BYTES = 4 * MIB
"""Bytes requested from all sources together before any has come: 10 Mbit/s carry these in half of
STATE_SOURCE_TIMEOUT."""
STATE_IN_FLIGHT_BYTES_MAX = 48 * MIB
"""The same at any time. Below DATA_MESSAGES_QUEUED_BYTES_MAX, at which frames of reduces wait, too."""
STATE_REQUESTS_IN_FLIGHT_MAX = 4096
"""Blocks requested from one source at the same time."""
STATE_REQUESTS_QUEUED_MAX = 2 * STATE_REQUESTS_IN_FLIGHT_MAX
"""Blocks that a source queues for one fetcher; further requests are dropped."""
STATE_RANGES_MAX = 8192
"""Ranges of blocks in one message."""
STATE_BATCH_BYTES = 256 * KIB
"""Small blocks are sent together in one message, up to this size."""
STATE_SEND_QUEUE_BYTES_MAX = 32 * MIB
"""Blocks to one fetcher that are queued or not acknowledged; the source prepares no more than these."""
STATE_ANNOUNCE_INTERVAL_NS = 5 * MS
"""Shortest time between two messages in which a partial seed announces new blocks."""
STATE_STEAL_INTERVAL_NS = 20 * MS
"""Endgame: interval at which a fetcher checks whether an idle source would deliver sooner than the one asked."""
STATE_STEAL_MARGIN_NS = 20 * MS
"""Endgame: a block is requested again if an idle source delivers it sooner by this time, and in half the time."""
STATE_STEAL_FIRST_NS = 500 * MS
"""Endgame: time per block that is assumed for a source whose rate is not measured yet."""
STATE_STAGING_CHUNK_BYTES = 64 * MIB
"""Fetched blocks are kept in memory chunks of this size until the commit."""
UPLOAD_LIMIT_MIN_BYTES = 1 * MIB
"""Lowest upload limit, per second. With less, fetchers that wait for their turn would hit STATE_SOURCE_TIMEOUT."""
OFFER_ANSWER_TIMEOUT_NS = 3 * SECOND
"""How long a joiner that prefetches state waits for links to members, and for their offers."""
OFFER_MAKING_TIMEOUT_NS = 60 * SECOND
"""How much longer it waits if there is no offer and a member does not answer, as that may be copying or digesting its
state: some 100 GiB."""
PREFETCH_TIMEOUT_NS = 600 * SECOND
"""Default timeout of a prefetch."""
STATE_STALL_TIMEOUT_NS = 30 * SECOND
"""A transfer in which no block arrives for this long fails."""
STATE_SOURCE_TIMEOUT_NS = 8 * SECOND
"""A source that sends nothing for this long is dropped, if there is another one. Above PATH_TIMEOUT, so that a source
that itself waits for a broken path notices that first."""
STATE_HEARD_MIN_BYTES = 64 * KIB
"""If its link has brought this many bytes meanwhile, a block may be on its way: it has STATE_STALL_TIMEOUT for that."""

# --- Checkpoints ----------------------------------------------------------------------------------------------------
CHECKPOINT_PIECE_BYTES = 1 * MIB
"""A tensor is read or written and digested in pieces of this size, which stay in the CPU cache."""

# --- Progress -------------------------------------------------------------------------------------------------------
PROGRESS_INTERVAL_NS = 100 * MS
"""Time between two calls of a progress callback."""
PROGRESS_LOG_INTERVAL_NS = 1 * SECOND
"""Time between two log lines about progress; shorter transfers log nothing."""
PROGRESS_WINDOW_NS = 4 * SECOND
"""Time window over which the rate is measured."""

# --- Torch ----------------------------------------------------------------------------------------------------------
TORCH_TAGS_PER_SIGNATURE_MAX = 16
"""Equal collectives of a torch process group that run at the same time; one more waits for the first of them."""
TORCH_CALLBACK_THREADS_MAX = CALLS_IN_FLIGHT_MAX
"""Threads of a process group that complete futures and run their callbacks, started when none is idle. Each callback
may wait for another collective, whose future needs one more thread."""
TORCH_MASTER_TIMEOUT_NS = 10 * SECOND
"""How long a process group waits for an unreachable master that runs in the process of one of its ranks."""
TORCH_LEAVE_TIMEOUT_NS = 5 * SECOND
"""How long the rank whose process runs the master waits, when it leaves a process group, until all others have left;
and how long any rank waits, at the end of its program, for callbacks and messages that still run."""
TORCH_SAMPLES_MAX = 2**32
"""Samples of an ElasticSampler, whose order takes 8 bytes per sample on each peer."""
TORCH_COUNTS_MAX = 64
"""Asynchronous all-reduces of one element whose Work a process group keeps: torch may wait for it after the program has
dropped it. DDP under `join` makes one for each forward pass, and needs it in the backward pass."""
TORCH_JOIN_INTERVAL_NS = 5 * MS
"""Interval at which a process group that is being made looks for ranks to admit."""
TORCH_ARRIVAL_INTERVAL_NS = 50 * MS
"""Interval at which a rank whose first message waits for the other rank looks whether that has come or is lost."""

# --- zpccl launch ---------------------------------------------------------------------------------------------------
LAUNCH_PROCESSES_MAX = 1024
"""Processes that run at the same time."""
LAUNCH_LINE_BYTES_MAX = 64 * KIB
"""A longer line of a process is cut."""
LAUNCH_STOP_TIMEOUT_NS = 10 * SECOND
"""Time that processes have to end after Ctrl-C before they are killed; also for processes that `--chaos join` started,
after another process has ended with status 0."""


# --- Limits that follow from others ---------------------------------------------------------------------------------
def calls_in_flight_max(member_count: int) -> int:
    """The number of unanswered calls that a peer may have in a group of `member_count` members.

    A report contains the running attempts of a peer and as many decided ones, each with the calls of all members. The
    product of calls and members is bounded so that a report fits into a message.
    """
    return min(CALLS_IN_FLIGHT_MAX, CALLS_NAMED_MAX // max(member_count, 1))


def calls_open_max(member_count: int) -> int:
    """The number of calls of a peer that the master has not decided: those in flight, and those that have returned."""
    return calls_in_flight_max(member_count) + (CALLS_UNDECIDED_MAX if member_count <= COMMIT_PEERS_MAX else 0)
