"""zpccl doctor: reports what this host can do in a run, and what to change."""

from __future__ import annotations

import argparse
import os
import socket

from zpccl import limits
from zpccl.cli.findings import Finding, Level, as_json, as_table, is_good
from zpccl.cli.host_checks import check_host
from zpccl.cli.master_checks import ask, judge
from zpccl.communicator import Communicator
from zpccl.control.addresses import (
    advertised_address,
    is_loopback,
    listen_on_first_free,
    parse_address,
    parse_listen,
    parse_masters,
    reachable_at,
)
from zpccl.control.keys import PeerKeys, peer_keys
from zpccl.control.link_ends import interface_of
from zpccl.control.switches import read_switch
from zpccl.errors import PCCLError


def add_arguments(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to those of zpccl."""
    doctor = commands.add_parser(
        "doctor",
        help="say what this host can do in a run, and what to change",
        description="Checks this host as a peer would use it: its addresses, whether the master is reached and can "
        "dial back, NAT, MTU, TCP's buffers and congestion control, open files, the secret, the clock. It takes part "
        "in no run, and disturbs none. ZPCCL_SECRET, ZPCCL_SECRET_FILE and ZPCCL_MASTER_KEY count as for a peer. "
        "Status 1 if there is a problem, 0 if there are only warnings.",
    )
    doctor.add_argument(
        "--master",
        metavar="HOST:PORT",
        default=os.environ.get("ZPCCL_MASTER") or f"127.0.0.1:{limits.MASTER_PORT}",
        help="the master, or the list of masters, as a peer gets it (default: ZPCCL_MASTER, or %(default)s)",
    )
    doctor.add_argument("--listen", metavar="HOST:PORTS", help="listen= of a peer on this host (default: ZPCCL_LISTEN)")
    doctor.add_argument("--advertise", metavar="HOST", help="advertise= of that peer (default: ZPCCL_ADVERTISE)")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status.

    Raises:
        PCCLError: an option or an environment variable is invalid.
    """
    # Raises if a variable is malformed. Encryption is off here, because there is a finding for it.
    read_switch(None, "encrypt")
    Communicator(options.master, listen=options.listen, advertise=options.advertise, encrypt=False)
    masters, keys = parse_masters(options.master), peer_keys()
    host, ports = parse_listen(options.listen or os.environ.get("ZPCCL_LISTEN"))
    advertise = options.advertise or os.environ.get("ZPCCL_ADVERTISE") or ""
    findings = examine(masters, keys, host, ports, advertise)
    print(as_json(findings) if options.json else as_table(findings))
    return 0 if is_good(findings) else 1


def examine(masters: tuple[str, ...], keys: PeerKeys | None, host: str, ports: range, advertise: str) -> list[Finding]:
    """All findings: about the addresses, each master and the host."""
    try:
        listener = listen_on_first_free(host, ports)
    except PCCLError as error:
        none = Finding("addresses", Level.PROBLEM, error.message, "zpccl doctor --listen HOST:FIRST-LAST")
        return [
            none,
            *_ask_masters(masters, keys, None, (), ports, advertise),
            *check_host(has_secret=keys is not None),
        ]
    with listener:
        port = listener.getsockname()[1]
        used = range(port, max(ports.stop, port + 1))
        advertise = advertise and advertised_address(advertise, port)
        candidates = reachable_at(listener, advertise or None, masters)
        findings = [_judge_addresses(candidates, masters)]
        own = reachable_at(listener, None, masters)
        findings += _ask_masters(masters, keys, listener, own, used, advertise)
    return [*findings, *check_host(has_secret=keys is not None)]


def _judge_addresses(candidates: tuple[str, ...], masters: tuple[str, ...]) -> Finding:
    named = []
    for candidate in candidates:
        host = parse_address(candidate)[0]
        interface = interface_of(host)
        named.append(f"{candidate} ({interface})" if interface else candidate)
    text = f"others are told, in this order: {', '.join(named)}"
    if all(is_loopback(parse_address(candidate)[0]) for candidate in candidates):
        fix = "ip address    # and bring an interface up; or listen on another address: --listen"
        is_of_one_host = all(is_loopback(parse_address(master)[0]) for master in masters)  # Enough for a trial.
        level = Level.WARNING if is_of_one_host else Level.PROBLEM
        return Finding("addresses", level, f"{text}; no other host can reach these", fix)
    return Finding("addresses", Level.OK, text)


def _ask_masters(
    masters: tuple[str, ...],
    keys: PeerKeys | None,
    listener: socket.socket | None,
    own: tuple[str, ...],
    ports: range,
    advertise: str,
) -> list[Finding]:
    findings: list[Finding] = []
    for address in masters:
        port = 0 if listener is None else parse_address(advertise)[1] if advertise else ports.start
        findings += judge(address, ask(address, keys, listener, port), own, ports, advertise)
    return findings
