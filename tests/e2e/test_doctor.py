"""zpccl doctor as users start it, with a real zpccl-master."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from networks import DEVICE, Namespaces

from e2e.harness import HANG_SECONDS, MasterProcess, cluster
from e2e.networks import hosts, load_rules
from e2e.secured import SECRET, write_private
from zpccl import limits
from zpccl.control.addresses import parse_address
from zpccl.control.keys import new_secret
from zpccl.protocol.messages import MAGIC, CheckAnswer, encode

pytestmark = pytest.mark.e2e

COMMAND = [str(Path(sys.executable).with_name("zpccl")), "doctor"]
Findings = dict[str, dict[str, str]]


def start(*arguments: str, network: Namespaces | None = None, host: int = 0, **changes: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ZPCCL_")} | changes

    def begin() -> subprocess.Popen[str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*COMMAND, *arguments], text=True, env=environment, **pipes)

    return begin() if network is None else network.run(host, begin)


def run(*arguments: str, **options: Any) -> tuple[int, str, str]:
    """Runs the command. Returns its status, output and errors."""
    with start(*arguments, **options) as child:
        output, errors = child.communicate(timeout=HANG_SECONDS)
    return child.returncode, output, errors


def findings(*arguments: str, **options: Any) -> tuple[int, Findings]:
    """Runs the command. Returns its status, and its findings by the name of the check."""
    status, output, errors = run(*arguments, "--json", **options)
    assert errors == ""
    report = json.loads(output)
    assert report["is_good"] is (status == 0)
    return status, {found["check"]: found for found in report["findings"]}


def levels(found: Findings, *checks: str) -> list[str]:
    assert found.keys() >= set(checks), found
    return [found[check]["level"] for check in checks]


def test_a_good_host() -> None:
    with hosts(2) as network, cluster(network=network) as cluster_:
        status, found = findings("--master", cluster_.master.address, network=network, host=1)
        assert status == 0
        assert set(levels(found, "addresses", "master", "NAT", "data port", "MTU", "clock")) == {"ok"}
        assert f"{network.address(1)} ({DEVICE})" in found["master"]["text"]
        assert f"{network.address(1)}:{limits.PEER_PORT_FIRST}" in found["data port"]["text"]
        assert f"{network.address(1)}:{limits.PEER_PORT_FIRST} ({DEVICE})" in found["addresses"]["text"]
        assert found["MTU"]["text"].startswith("1500 bytes")
        assert "refused" not in cluster_.master.log.read_text() and "malformed" not in cluster_.master.log.read_text()


def test_a_table_for_people() -> None:
    with cluster() as cluster_:
        status, output, errors = run("--master", cluster_.master.address)
        assert (status, errors) == (0, ""), output
        assert "data port" in output and "0 problems" in output and "Traceback" not in output


NAT = """
table ip nat {
    chain post {
        type nat hook postrouting priority 100;
        iifname "host1" oifname "host0" masquerade;
    }
}
"""
"""Rules of the router: others see its address in place of that of host 1."""
FORWARD = """
table ip nat {{
    chain pre {{
        type nat hook prerouting priority -100;
        tcp dport 5000 dnat to {}:{};
    }}
}}
"""
FIREWALL = """
table inet filter {
    chain input {
        type filter hook input priority 0; policy accept;
        ct state established accept;
        tcp dport 48149-49148 drop;
    }
}
"""


def test_behind_nat() -> None:
    with hosts(2) as network, cluster(network=network) as cluster_:
        network.run_at_router(lambda: load_rules(NAT))
        status, found = findings("--master", cluster_.master.address, network=network, host=1)
        assert status == 1
        assert levels(found, "master", "NAT", "data port") == ["ok", "warning", "problem"]
        assert "10.0.0.1" in found["NAT"]["text"] and network.address(1) in found["NAT"]["text"]
        fix = found["data port"]["fix"]
        assert f"ZPCCL_ADVERTISE=10.0.0.1:{limits.PEER_PORT_FIRST}" in fix and network.address(1) in fix


def test_behind_nat_that_does_not_forward_what_is_advertised() -> None:
    """The advertised address does not belong to this host: the finding blames the router, not the firewall here."""
    with hosts(2) as network, cluster(network=network) as cluster_:
        network.run_at_router(lambda: load_rules(NAT))
        arguments = ["--master", cluster_.master.address, "--advertise", "10.0.0.1:5000"]
        status, found = findings(*arguments, network=network, host=1)
        assert (status, levels(found, "NAT", "data port")) == (1, ["warning", "problem"])
        fix = found["data port"]["fix"]
        assert fix.startswith("forward TCP port 5000") and f"{network.address(1)}:{limits.PEER_PORT_FIRST}" in fix


def test_behind_nat_that_forwards_the_port() -> None:
    """The advice of the finding works."""
    with hosts(2) as network, cluster(network=network) as cluster_:
        network.run_at_router(lambda: load_rules(NAT))
        forward = FORWARD.format(network.address(1), limits.PEER_PORT_FIRST)
        network.run_at_router(lambda: load_rules(forward))
        arguments = ["--master", cluster_.master.address, "--advertise", "10.0.0.1:5000"]
        status, found = findings(*arguments, network=network, host=1)
        assert (status, levels(found, "NAT", "data port")) == (0, ["ok", "ok"])
        assert "10.0.0.1:5000" in found["data port"]["text"]


def test_a_blocked_port() -> None:
    """The port drops packets, as with a firewall. The check ends in bounded time; the advised command opens it."""
    with hosts(2) as network, cluster(network=network) as cluster_:
        network.run(1, lambda: load_rules(FIREWALL))
        status, found = findings("--master", cluster_.master.address, network=network, host=1)
        assert (status, levels(found, "NAT", "data port")) == (1, ["ok", "problem"])
        assert "48149" in found["data port"]["fix"]
        if (command := found["data port"]["fix"].partition("#")[0]).startswith("nft "):
            network.run(1, lambda: subprocess.run(command.split(), check=True))
            status, found = findings("--master", cluster_.master.address, network=network, host=1)
            assert (status, levels(found, "data port")) == (0, ["ok"])


def test_without_a_master() -> None:
    """The report says so, and shows the other findings."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    status, found = findings("--master", address)
    assert (status, levels(found, "master")) == (1, ["problem"])
    assert address in found["master"]["text"] and "refused" in found["master"]["text"]
    assert "zpccl-master" in found["master"]["fix"]
    assert {"addresses", "congestion control", "open files", "tcp_rmem"} <= set(found)


@pytest.mark.slow
def test_a_path_that_drops_everything() -> None:
    """L1."""
    with hosts(2) as network:
        network.cut(0, 1)
        status, found = findings("--master", f"{network.address(0)}:48148", network=network, host=1)
    assert status == 1 and "timed out" in found["master"]["text"]


@pytest.mark.parametrize(
    ("secret", "text"),
    [(None, "this host has none"), (new_secret(), "its secret or key differs"), (SECRET, "")],
    ids=["none", "another", "the same"],
)
def test_a_run_with_a_secret(tmp_path: Path, secret: str | None, text: str) -> None:
    """S7: only a caller with the secret gets an answer."""
    file = write_private(tmp_path / "secret", SECRET)
    with cluster("--secret-file", file) as cluster_:
        status, found = findings(
            "--master", cluster_.master.address, **({"ZPCCL_SECRET": secret} if secret is not None else {})
        )
    assert text in found["master"]["text"]
    assert levels(found, "master") == ["problem" if text else "ok"]
    assert status == (1 if text else 0) and ("data port" in found) is (not text)


def test_a_secret_that_the_master_has_not() -> None:
    with cluster() as cluster_:
        status, found = findings("--master", cluster_.master.address, ZPCCL_SECRET=SECRET)
    assert status == 1 and "the master there has none" in found["master"]["text"]


@pytest.mark.slow
def test_several_masters(tmp_path: Path) -> None:
    with cluster() as cluster_:
        other = MasterProcess(str(tmp_path), "other")
        try:
            status, output, _ = run("--master", f"{cluster_.master.address},{other.address}", "--json")
        finally:
            other.kill()
    texts = [found["text"] for found in json.loads(output)["findings"] if found["check"] == "master"]
    assert status == 0 and len(texts) == 2 and other.address in texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
def test_something_that_is_no_master(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with start("--master", f"127.0.0.1:{server.getsockname()[1]}", "--json") as child:
            accepted = [server.accept()[0]]
            accepted[0].sendall(said)
            if said:
                accepted[0].shutdown(socket.SHUT_WR)
            output, errors = child.communicate(timeout=HANG_SECONDS)
        accepted[0].close()
    assert (child.returncode, errors) == (1, "")
    assert json.loads(output)["findings"][1]["level"] == "problem"


def told(answer: bytes) -> str:
    """The finding on a master that gives this answer."""
    zmq = pytest.importorskip("zmq")
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with start("--master", f"127.0.0.1:{port}", "--json") as child:
            assert router.poll(HANG_SECONDS * 1000)
            sender, _ = router.recv_multipart()
            router.send_multipart([sender, answer])
            output, _ = child.communicate(timeout=HANG_SECONDS)
    assert child.returncode == 1
    return str(json.loads(output)["findings"][1]["text"])


def test_a_master_of_another_version() -> None:
    text = told(MAGIC + bytes([limits.PROTOCOL_VERSION + 1]) + b"?")
    assert f"version {limits.PROTOCOL_VERSION + 1}" in text


def test_a_master_that_tells_a_command_in_place_of_an_address() -> None:
    """S7: anybody may be the master of a run without a secret."""
    text = told(encode(CheckAnswer("x;reboot", True, 0)))
    assert "not a master" in text and "reboot" not in text


def test_ctrl_c() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, start("--master", address_of(silent)) as child, silent.accept()[0]:  # It now waits for an answer.
        child.send_signal(signal.SIGINT)
        output, errors = child.communicate(timeout=HANG_SECONDS)
    assert (child.returncode, output, errors) == (130, "", "zpccl: interrupted\n")


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_help() -> None:
    status, output, errors = run("--help")
    assert (status, errors) == (0, "")
    assert all(word in output for word in ("--master", "--json", "--advertise", "ZPCCL_SECRET"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--master", "nonsense"], "nonsense"),
        (["--master", "h:1", "--listen", "x:y"], "x:y"),
        (["--master", "h:1", "--advertise", "a b"], "a b"),
        (["--master", "h:1", "--advertise", "h:0"], "h:0"),
    ],
)
def test_bad_arguments_are_said_in_a_line(arguments: list[str], text: str) -> None:
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert text in errors and len(errors.splitlines()) == 1


def test_what_is_advertised_has_the_port_that_is_free() -> None:
    """The advertised address has the first free port: peers that run here use the ports before it."""
    with socket.create_server(("", 0)) as taken, cluster() as cluster_:
        port = taken.getsockname()[1]
        arguments = ["--master", cluster_.master.address, "--listen", f":{port}-{port + 100}"]
        status, found = findings(*arguments, "--advertise", "127.0.0.1")
    assert (status, levels(found, "data port")) == (0, ["ok"]) and f":{port} " not in found["addresses"]["text"]


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, cluster() as cluster_:
        listen = address_of(taken)
        status, found = findings("--master", cluster_.master.address, "--listen", listen)
    assert status == 1 and levels(found, "addresses", "master") == ["problem", "ok"]
    assert str(parse_address(listen)[1]) in found["addresses"]["text"] and "data port" not in found
