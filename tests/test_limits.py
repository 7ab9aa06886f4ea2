"""Bounds that depend on each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zpccl import limits

UNITS = (
    "NS US MS MAX BYTES BITS DEFAULT PORT FIRST COUNT VERSION ELEMENTS PERCENT SECOND KIB MIB BACKLOG FLIGHT CPUS "
    "HANDSHAKES"
).split()


def test_bounds_are_positive_numbers_with_a_unit() -> None:
    names = [name for name in vars(limits) if name.isupper()]
    assert len(names) > 40
    for name in names:
        value = getattr(limits, name)
        assert isinstance(value, int), name
        assert value > 0, name
        assert re.split("_", name)[-1] in UNITS, name


def test_bounds_that_need_each_other() -> None:
    # An answer that was lost with its connection must still be there when the peer asks again.
    assert limits.ANSWERS_KEPT_MAX >= limits.CALLS_IN_FLIGHT_MAX
    # A peer may send everything about all its calls in one message.
    assert limits.SPECS_PER_MESSAGE_MAX >= limits.CALLS_IN_FLIGHT_MAX
    # A full list of links fits into a message, and so does one of members with long names in any letters.
    assert limits.PEERS_MAX * 18 < limits.MESSAGE_BYTES_MAX
    assert limits.PEERS_MAX * (18 + 5 + 3 + 4 * limits.NAME_CHARS_MAX) < limits.MESSAGE_BYTES_MAX
    addresses_bytes = limits.ADDRESSES_PER_PEER_MAX * (limits.ADDRESS_CHARS_MAX + 3)
    assert limits.PEERS_MAX * (18 + 3 + 4 * limits.NAME_CHARS_MAX + addresses_bytes) < limits.MESSAGE_BYTES_MAX
    # So does a list of these members with all knowledge of the network.
    members_bytes = limits.PEERS_MAX * (18 + 5 + 3 + 4 * limits.NAME_CHARS_MAX + 1 + 3 + 2 * 9)
    assert members_bytes + limits.PATHS_TOLD_MAX * (1 + 2 * 3 + 3 * 9) < limits.MESSAGE_BYTES_MAX
    # A block of state fits into a data message, with its header.
    assert limits.STATE_BLOCK_BYTES < limits.DATA_MESSAGE_BYTES_MAX
    # The blocks that a fetcher requests never fill the queues at which frames of reduces wait. Small blocks fit into
    # one message.
    assert limits.STATE_WINDOW_MIN_BYTES <= limits.STATE_WINDOW_FIRST_BYTES <= limits.STATE_WINDOW_BYTES_MAX
    assert limits.STATE_WINDOW_BYTES_MAX <= limits.STATE_IN_FLIGHT_BYTES_MAX < limits.DATA_MESSAGES_QUEUED_BYTES_MAX
    assert limits.STATE_SEND_QUEUE_BYTES_MAX < limits.DATA_MESSAGES_QUEUED_BYTES_MAX
    assert limits.STATE_BATCH_BYTES < limits.DATA_MESSAGE_BYTES_MAX
    assert limits.STATE_RANGES_MAX >= limits.STATE_REQUESTS_IN_FLIGHT_MAX
    # A receiver that begins other calls first keeps small tensors, larger ones (half of its memory: early.c), digests.
    assert limits.PLANS_AHEAD_BYTES_MAX < limits.DATA_MESSAGES_QUEUED_BYTES_MAX // 2
    # A peer that comes back in time is not counted as dead before its links are given up.
    assert limits.DISCONNECT_GRACE_NS < limits.HEARTBEAT_TIMEOUT_NS
    assert limits.ADMISSION_WAIT_NS < limits.LINK_WAIT_TIMEOUT_NS
    assert limits.LINK_SETUP_TIMEOUT_NS < limits.LINK_WAIT_TIMEOUT_NS
    assert limits.PATH_TIMEOUT_NS < limits.STALL_TIMEOUT_NS  # The ends of a broken path know first.
    assert limits.PATH_TIMEOUT_NS < limits.STATE_SOURCE_TIMEOUT_NS < limits.STATE_STALL_TIMEOUT_NS
    assert limits.LINK_FAILING_MAX_NS < limits.LINK_SUSPECT_NS
    assert limits.UNEXPLAINED_STALL_MIN_NS < limits.STALL_TIMEOUT_NS  # And doubts about several rings coexist.
    assert 3 * limits.LINK_DOUBTS_MAX * limits.STALL_TIMEOUT_NS <= limits.LINK_SUSPECT_NS
    assert limits.LINK_CONNECTIONS_DEFAULT <= limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT
    assert limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT <= limits.LINK_CONNECTIONS_FAR_DEFAULT <= limits.LINK_CONNECTIONS_MAX
    assert limits.FRAME_BYTES_DEFAULT <= limits.FRAME_BYTES_MAX
    assert limits.PENDING_PEERS_MAX <= limits.PEERS_MAX
    silent_bytes = limits.HEARTBEAT_BYTES_PER_SECOND_MAX * limits.PEER_SILENCE_NS // limits.SECOND
    assert limits.PENDING_PEERS_MAX * silent_bytes < limits.OUTSIDERS_BYTES_MAX
    assert limits.PEERS_MAX * silent_bytes < limits.CONNECTIONS_BYTES_MAX
    assert limits.PEER_PORT_FIRST + limits.PEER_PORT_COUNT <= 65536


@pytest.mark.parametrize("members", [0, 1, 2, 3, 64, 65, 100, 1000, limits.PEERS_MAX])
def test_calls_in_flight_and_members_together(members: int) -> None:
    found = limits.calls_in_flight_max(members)
    assert 0 < found <= limits.CALLS_IN_FLIGHT_MAX
    assert found * members <= limits.CALLS_NAMED_MAX
    assert found == limits.CALLS_IN_FLIGHT_MAX or (found + 1) * members > limits.CALLS_NAMED_MAX
    assert found // 2 > 0  # all_reduce_multiple_with_retry makes half as many together.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ZP__WORLD_SIZE_MAX", limits.PEERS_MAX),
        ("ZP__EAGER_TENSOR_BYTES", limits.PLAN_AHEAD_SMALL_BYTES),
        ("ZP__EARLY_CHARGE_MIN", limits.PLAN_AHEAD_CHARGE_BYTES),
    ],
)
def test_the_data_plane_has_the_same_bounds(name: str, value: int) -> None:
    header = Path(__file__).resolve().parent.parent / "native" / "bounds.h"
    found = re.search(rf"#define {name} \(?(\d+)u(?: << (\d+))?", header.read_text(encoding="ascii"))
    assert found is not None and int(found[1]) << int(found[2] or 0) == value
