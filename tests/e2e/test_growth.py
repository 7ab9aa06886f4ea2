"""Links to far hosts grow by themselves while they are used, and both ends agree on what they are."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from networks import NetworkUnavailable
from wan.emulated import EmulatedNetwork
from wan.settings import Settings

from e2e.harness import Peer, cluster, until
from zpccl import limits

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ELEMENTS = 4 << 20
MOST = 9
SEND_BUFFERS = Path("/proc/sys/net/ipv4/tcp_wmem")
IN_A_HURRY = {
    "LINK_CONNECTIONS_GROWN_MAX": MOST,
    "LINK_GROWTH_LOOK_NS": 10 * limits.MS,
    "LINK_GROWTH_WINDOW_NS": 100 * limits.MS,
}
HELPED = {"LINK_GROWTH_TRIES_MAX": 10**6}
"""However busy this machine is, more connections show some time that they help."""
NOT_HELPED = {"LINK_GROWTH_GAIN_PERCENT": 10**6}
"""Nothing is enough."""


def reduce_until_settled(peer: Peer, bounds: dict[str, int], count: int) -> dict[str, Any]:
    """Reduces until a link has settled on so many connections. No call may fail, and each result is checked."""
    lines: list[str] = []
    logger, handler = logging.getLogger("zpccl.links"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    loop = peer.comm._loop
    assert loop is not None
    hurry: dict[str, Any] = {**IN_A_HURRY, **bounds}
    may_grow, is_over = not loop._growing.is_settled, False
    with mock.patch.multiple(limits, **hurry):
        while not is_over:
            send = np.full(ELEMENTS, peer.comm.rank + 1, np.float32)
            send[0] = may_grow and loop._growing.is_settled
            result = peer.comm.all_reduce(send)
            assert (result[1:] == 3).all(), "S1"
            is_over = result[0] > 0
    (other,) = loop._link_ids
    until(lambda: loop._engine.link_state(other).open_count == count, "all connections")
    return {"lines": lines, "may_grow": may_grow, "state": loop._engine.link_state(other)}


@pytest.mark.parametrize(("bounds", "count"), [(HELPED, MOST), (NOT_HELPED, 4)])
def test_a_far_link_grows_while_it_is_used(bounds: dict[str, int], count: int) -> None:
    """Each connection has few bytes under way, so only more of them carry more. The side that dialled adds them, and
    takes them back where they are found not to help."""
    try:
        network = EmulatedNetwork(Settings(3).with_lines(["link * * delay_ms=2"]), realtime=False)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        for host in (1, 2):
            network.run(host, lambda: SEND_BUFFERS.write_text("4096 16384 16384", encoding="ascii"))
        with cluster(network=network) as run:  # type: ignore[arg-type]
            children = run.members(2)
            for child in children:
                child.start(reduce_until_settled, bounds, count)
            facts = [child.value(90) for child in children]
    states = [fact["state"] for fact in facts]
    assert [state.lost_count for state in states] == [0 if count == MOST else 2] * 2
    assert [state.generations for state in states] == [[0] * 4 + [1] * (max(count, 6) - 4)] * 2
    assert all(min(state.tx_bytes) > 0 and min(state.rx_bytes) > 0 for state in states), "all are in use"
    assert sorted(fact["may_grow"] for fact in facts) == [False, True]
    (lines,) = [fact["lines"] for fact in facts if fact["may_grow"]]
    assert len(lines) == 1 and lines[0].startswith("link to peer") and f": {count} connections, " in lines[0]
