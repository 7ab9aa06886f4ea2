"""Checks of this host that need no master: buffers, congestion control, open files, encryption."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

from zpccl import limits
from zpccl.cli.findings import Finding, Level
from zpccl.control.connection_count import ask_for_bbr
from zpccl.control.encryption import ciphers_to_offer
from zpccl.engine.ciphers import Cipher, available
from zpccl.errors import InvalidArgument

SETTINGS = Path("/proc/sys/net")


def check_host(*, has_secret: bool) -> list[Finding]:
    """The findings of all checks of this file."""
    return [*check_buffers(), check_congestion_control(), check_open_files(), check_encryption(has_secret)]


def check_buffers() -> list[Finding]:
    """The largest buffers that TCP may choose bound the data in flight of a connection, and so its rate.

    zpccl sets no buffer sizes, since that would end TCP's own choice. So rmem_max and wmem_max bound nothing; they are
    shown because people look for them.
    """
    findings = []
    for name, other, default in (
        ("tcp_rmem", "rmem_max", "4096 131072 6291456"),
        ("tcp_wmem", "wmem_max", "4096 16384 4194304"),
    ):
        text, maximum = setting(f"ipv4/{name}"), setting(f"core/{other}")
        beside = f" (net.core.{other} {maximum} does not bound it)" if maximum else ""
        if not text:
            findings.append(Finding(name, Level.WARNING, "this system does not tell how large TCP's buffers may be"))
        elif (size := int(text.split()[-1])) < limits.TCP_BUFFER_BYTES:
            why = f"over a path with 100 ms a connection carries at most {size * 8 / 0.1 / 1e6:.0f} Mbit/s"
            fix = f"sysctl -w net.ipv4.{name}='{default}'"
            findings.append(Finding(name, Level.WARNING, f"net.ipv4.{name} is {text}: {why}", fix))
        else:
            findings.append(Finding(name, Level.OK, f"net.ipv4.{name} is {text}{beside}"))
    return findings


def check_congestion_control() -> Finding:
    """Whether this process may choose BBR, which links over far paths ask for."""
    name = "congestion control"
    default = setting("ipv4/tcp_congestion_control") or "unknown"
    with socket.socket() as probe:
        if ask_for_bbr(probe):
            return Finding(name, Level.OK, f"{default}; far links use BBR, which the kernel lets this process choose")
    text = (
        f"{default}; the kernel does not let this process use BBR, so far links have "
        f"{limits.LINK_CONNECTIONS_FAR_DEFAULT} connections and lose rate with each lost packet"
    )
    commands = [] if "bbr" in setting("ipv4/tcp_available_congestion_control").split() else ["modprobe tcp_bbr"]
    allowed = setting("ipv4/tcp_allowed_congestion_control") or "reno cubic"
    commands.append(f"sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} bbr'")
    return Finding(name, Level.WARNING, text, "\n".join(commands))


def check_open_files() -> Finding:
    """Whether the limit on open files suffices: each connection needs a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most, few = limits.LINK_CONNECTIONS_FAR_DEFAULT, limits.LINK_CONNECTIONS_FAR_BBR_DEFAULT
    left = max(0, soft - 100)
    text = (
        f"{soft} open files, enough for {left // most} far peers with {most} connections each, or for {left // few} "
        f"with {few} each, as with BBR"
    )
    if soft == resource.RLIM_INFINITY or soft >= limits.OPEN_FILES_COUNT:
        return Finding("open files", Level.OK, text if soft != resource.RLIM_INFINITY else "no limit")
    is_enough = hard == resource.RLIM_INFINITY or hard >= limits.OPEN_FILES_COUNT
    fix = f"ulimit -n {limits.OPEN_FILES_COUNT}"
    return Finding("open files", Level.WARNING, text, fix if is_enough else f"{fix}    # as root")


def check_encryption(has_secret: bool) -> Finding:
    """Whether tensors and state are encrypted, with the defaults of Communicator."""
    try:
        ciphers = ciphers_to_offer(None, has_secret=has_secret)
    except InvalidArgument as error:
        is_lacking = has_secret and not available()
        fix = "pip install 'zpccl[secure]'" if is_lacking else "unset ZPCCL_ENCRYPT    # then a secret decides"
        return Finding("secret", Level.PROBLEM, error.message, fix)
    if not has_secret:
        text = "no secret (ZPCCL_SECRET): anybody who reaches the ports can take part, and nothing is encrypted"
        return Finding("secret", Level.WARNING, text, "zpccl keygen --out run.secret    # for the master and all peers")
    if ciphers == (Cipher.PLAIN,):
        return Finding("secret", Level.OK, "peers are authenticated; ZPCCL_ENCRYPT leaves data unencrypted")
    return Finding("secret", Level.OK, f"peers are authenticated, and data is encrypted by {ciphers[0].name}")


def setting(name: str) -> str:
    """A setting of the kernel, with single spaces; "" if it does not exist, as in some containers."""
    try:
        return " ".join((SETTINGS / name).read_text(encoding="ascii").split())
    except OSError:
        return ""
