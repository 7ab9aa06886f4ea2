"""Rates of paths, measured while attempts run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engine_mesh import Case, Hosts, Mesh, make_plan, peer_id, until, wait_done

from zpccl import limits
from zpccl.control.rates import RateMeter, measure
from zpccl.engine.engine import LinkFlow
from zpccl.protocol.messages import PathSample

BEFORE = LinkFlow(
    link_id=7, round_trip_us=900, queued_us=0, acked_bytes=[100, 5000], busy_us=[10, 20], is_limited=[False, False]
)
MIB = 1 << 20


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    mesh = Hosts(2)
    yield mesh
    mesh.close()


def after(*sent: int, busy: tuple[int, ...], limited: tuple[bool, ...] = (True, True)) -> LinkFlow:
    """The counters after this many more bytes are acknowledged."""
    acked = [old + new for old, new in zip(BEFORE.acked_bytes, sent, strict=True)]
    times = [old + new for old, new in zip(BEFORE.busy_us, busy, strict=True)]
    return replace(BEFORE, acked_bytes=acked, busy_us=times, is_limited=list(limited))


def test_connections_send_side_by_side() -> None:
    """Their bytes are added. The time is that of the connection that was busy longest."""
    sample = measure(peer_id(1), BEFORE, after(MIB, 2 * MIB, busy=(400, 300)))
    assert sample == PathSample(peer_id(1), 3 * MIB, 400, 900, is_limited=True)


@pytest.mark.parametrize(("limited", "expected"), [((True, False), False), ((False, True), True)])
def test_the_path_is_the_limit_where_most_bytes_found_it_so(limited: tuple[bool, ...], expected: bool) -> None:
    sample = measure(peer_id(1), BEFORE, after(MIB, 2 * MIB, busy=(400, 300), limited=limited))
    assert sample is not None and sample.is_limited == expected


def test_a_connection_that_was_replaced_counts_for_nothing() -> None:
    sample = measure(peer_id(1), BEFORE, after(MIB, -4000, busy=(400, -5)))
    assert sample is not None and (sample.sent_bytes, sample.busy_us) == (MIB, 400)


@pytest.mark.parametrize(
    "flow",
    [None, replace(BEFORE, link_id=8), BEFORE, after(limits.RATE_SAMPLE_BYTES - 1, 0, busy=(9, 0))],
    ids=["lost", "another link", "nothing sent", "little sent"],
)
def test_what_is_no_measurement(flow: LinkFlow | None) -> None:
    assert measure(peer_id(1), BEFORE, flow) is None


def test_an_attempt_is_measured_once(hosts: Hosts) -> None:
    meters = [RateMeter(engine) for engine in hosts.engines]
    count = 4 * MIB
    arrays = [(np.ones(count, np.float32), np.empty(count, np.float32)) for _ in meters]
    peers = [peer_id(0), peer_id(1)]
    for rank, meter in enumerate(meters):
        meter.begin(1, peers)
        hosts.engines[rank].start_reduce(make_plan(Case(), 1, rank, 2, *arrays[rank]))
    for engine in hosts.engines:
        assert wait_done(engine).status == 0

    def all_is_acknowledged() -> bool:
        flows = [engine.link_flow(peer_id(1 - rank)) for rank, engine in enumerate(hosts.engines)]
        return all(sum(flow.acked_bytes) > arrays[0][0].nbytes for flow in flows)

    until(all_is_acknowledged)
    for rank, meter in enumerate(meters):
        (sample,) = meter.end(1)
        assert sample.peer_id == peer_id(1 - rank)
        assert arrays[0][0].nbytes < sample.sent_bytes < 1.2 * arrays[0][0].nbytes
        assert sample.busy_us > 0 and sample.round_trip_us < limits.SECOND // limits.US
        assert meter.end(1) == ()


def test_a_link_that_is_lost_on_the_way_is_left_out(hosts: Hosts) -> None:
    meter = RateMeter(hosts.engines[0])
    meter.begin(1, [peer_id(1), peer_id(2)])
    hosts.engines[0].close_link(peer_id(1))
    assert meter.end(1) == ()


def test_within_a_host_nothing_is_measured() -> None:
    mesh = Mesh(2)
    flow = mesh.engines[0].link_flow(peer_id(1))
    mesh.close()
    assert (flow.acked_bytes, flow.busy_us, flow.round_trip_us) == ([0, 0], [0, 0], None)
