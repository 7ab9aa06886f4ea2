"""The metrics of a master while its run goes on."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

import zpccl
from e2e.harness import HANG_SECONDS, MasterProcess, close, cluster, reduce_until_told, until
from zpccl.control.keys import new_secret

pytestmark = pytest.mark.e2e


def scrape(address: str) -> dict[str, float]:
    """The value of each series, by "name" or "name/label"."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=HANG_SECONDS) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {"/".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}


def metrics_of(master: MasterProcess) -> str:
    found = until(lambda: re.search(r"metrics are at http://(\S+)/metrics", master.log.read_text()), "the metrics")
    return str(found[1])


def shows(address: str, **wanted: float) -> dict[str, float]:
    """Waits until the metrics show these values: a master publishes them soon after an event."""

    def look() -> Any:
        seen = scrape(address)
        return seen if all(seen.get(name.replace("__", "/")) == count for name, count in wanted.items()) else None

    seen: dict[str, float] = until(look, f"{wanted}")
    return seen


def test_a_run_is_seen() -> None:
    with cluster("--metrics", "127.0.0.1:0") as run:
        address = metrics_of(run.master)
        assert scrape(address)["zpccl_epoch"] == 0
        members = run.members(3)
        shows(address, zpccl_members__0=3, zpccl_connections=3)
        for member in members:
            member.start(reduce_until_told)
        for member in members:
            assert member.note() == "reducing"
        first = scrape(address)
        until(lambda: scrape(address)["zpccl_commits_total"] >= first["zpccl_commits_total"] + 10, "10 commits")
        second = scrape(address)
        growing = ("plans", "commits", "messages_received", "messages_sent", "received_bytes", "sent_bytes")
        for name in (*growing, "busy_seconds"):
            assert second[f"zpccl_{name}_total"] > first[f"zpccl_{name}_total"]
        members[0].tell()
        rounds = {member.value() for member in members}
        assert len(rounds) == 1
        total = rounds.pop()
        shows(address, zpccl_commits_total=total, zpccl_plans_total=total, zpccl_collectives_running=0)
        members[2].kill()
        shows(address, zpccl_peers_lost_total__disconnected=1, zpccl_members__0=2, zpccl_connections=2)
        for child in run.children[:2]:
            child.call(close)
        shows(address, zpccl_peers_lost_total__left=2, zpccl_connections=0)


def test_strangers_and_malformed_messages_are_counted() -> None:
    with zpccl.MasterNode("127.0.0.1:0", metrics="127.0.0.1:0") as master, zmq.Context() as context:
        assert master.metrics_address is not None
        with context.socket(zmq.DEALER) as stranger:
            stranger.connect(f"tcp://{master.address}")
            for _ in range(3):
                stranger.send(b"no message")
            shows(master.metrics_address, zpccl_malformed_messages_total=3, zpccl_messages_received_total=3)
            stranger.close(linger=0)
    with zpccl.MasterNode("127.0.0.1:0", secret=new_secret(), metrics="127.0.0.1:0") as master:
        assert master.metrics_address is not None
        assert scrape(master.metrics_address)["zpccl_refused_connections_total"] == 0
        with pytest.raises(zpccl.AuthenticationFailed):
            zpccl.Communicator(master.address).connect(1)
        until(lambda: scrape(str(master.metrics_address))["zpccl_refused_connections_total"] > 0, "a refusal")


def test_the_port_is_free_when_the_master_has_ended() -> None:
    with zpccl.MasterNode("127.0.0.1:0", metrics="127.0.0.1:0") as master:
        address = str(master.metrics_address)
        with pytest.raises(zpccl.InvalidUsage, match=r"metrics.*in use"):
            zpccl.MasterNode("127.0.0.1:0", metrics=address).run()
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))):
        pass


def test_a_master_with_metrics_ends_on_a_signal() -> None:
    with cluster("--metrics", "127.0.0.1:0") as run:
        scrape(metrics_of(run.master))
        run.master.signal(signal.SIGTERM)
        assert run.master.join() == 0
