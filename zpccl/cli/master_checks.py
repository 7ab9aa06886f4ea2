"""Checks of a host that need a master: from which address it is reached, which one it sees, if it can dial back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
import os
import shutil
import socket
import time
from dataclasses import dataclass, field

import zmq

from zpccl import limits
from zpccl.cli.findings import Finding, Level
from zpccl.control.addresses import addresses_of, format_address, is_name, parse_address, plain_host
from zpccl.control.connection_count import round_trip_ns
from zpccl.control.dial_back import TOKEN_HALF_BYTES
from zpccl.control.greeting import mechanism_of
from zpccl.control.keys import PeerKeys
from zpccl.control.link_ends import interface_of
from zpccl.control.master_loop import poll_timeout_ms
from zpccl.control.monitor import take_event
from zpccl.errors import InvalidArgument, ProtocolViolation
from zpccl.protocol.messages import CheckAnswer, CheckRequest, OtherVersion, decode_master_message, encode
from zpccl.topology import digits

_IP_MTU, _IPV6_MTU = 14, 24  # linux/in.h, in6.h
_EVENTS: dict[int, str] = {
    zmq.EVENT_CONNECTED: "connected",
    zmq.EVENT_HANDSHAKE_SUCCEEDED: "admitted",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "not allowed",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "refused",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "refused",
    zmq.EVENT_DISCONNECTED: "refused",
    zmq.EVENT_CLOSED: "refused",  # It was never connected.
    zmq.EVENT_CONNECT_RETRIED: "refused",  # The name has no such address.
}
_NEVER_MS = 2**30
"""libzmq reports a missing address only if it would retry later; the probe ends before that."""


@dataclass(slots=True)
class Reached:
    """The results of the checks with a master.

    Attributes:
        answer: the master's answer; None: there was none, because of `reason`.
        is_connected: some program accepts connections there.
        local_host: the address of this host from which the master was reached; "" if the connection broke at once.
        round_trip_ns: TCP's round-trip time; 0 if unknown.
        mtu: MTU of the route, as the kernel knows it; 0 if unknown.
        clock_ahead_ns: by how much the clock of the master is ahead of this one, give or take half a round trip.
        has_dialled_back: the master has reached the port that it was asked to dial.
    """

    answer: CheckAnswer | None = None
    reason: str = ""
    is_connected: bool = False
    local_host: str = ""
    round_trip_ns: int = 0
    mtu: int = 0
    clock_ahead_ns: int = 0
    has_dialled_back: bool = False
    asked_ns: int = field(default=0, repr=False)


class MasterProbe:
    """Asks one master, and waits for it to dial back. Use it in a `with` statement.

    Args:
        address: address of the master, "host:port".
        keys: keys of this peer; None in a run without a secret.
        listener: a listening, non-blocking socket; it still belongs to the caller. None: the master does not dial.
        port: the port that the master dials: that of the listener, or one that is forwarded to it.
        is_ipv6: dial an IPv6 address, if the name of the master has one.
    """

    def __init__(
        self, address: str, keys: PeerKeys | None, listener: socket.socket | None, port: int, *, is_ipv6: bool = True
    ) -> None:
        self._address, self._keys, self._listener, self._port = address, keys, listener, port
        self._token = os.urandom(2 * TOKEN_HALF_BYTES)
        self._found = Reached()
        self._is_over = False
        self._visitors: list[socket.socket] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, int(is_ipv6))
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.STRANGER_BYTES_MAX)  # The server may be anybody.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, limits.CONNECT_TIMEOUT_NS // limits.MS)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.master_public)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.private)
        self._monitor = self._socket.get_monitor_socket(functools.reduce(operator.or_, _EVENTS))

    def __enter__(self) -> MasterProbe:
        return self

    def __exit__(self, *exception: object) -> None:
        for visitor in self._visitors:
            visitor.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def run(self) -> Reached:
        """Asks the master. Waits CHECK_TIMEOUT for the answer, then DIAL_BACK_TIMEOUT for the dial."""
        found = self._found
        try:
            self._socket.connect(f"tcp://{self._address}")
        except zmq.ZMQError as error:
            found.reason = str(error.strerror)
            return found
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, *([self._listener] if self._listener is not None else [])):
            poller.register(source, zmq.POLLIN)
        deadline_ns = time.monotonic_ns() + limits.CHECK_TIMEOUT_NS
        while timeout_ms := poll_timeout_ms(deadline_ns, time.monotonic_ns()):
            had_answer = found.answer is not None
            ready = dict(poller.poll(timeout_ms))
            if self._monitor in ready:
                self._on_monitor()
            if self._socket in ready:
                self._on_message()
            if self._listener is not None and self._listener.fileno() in ready:
                self._on_visitor(poller)
            for visitor in [visitor for visitor in self._visitors if visitor.fileno() in ready]:
                self._on_echo(visitor, poller)
            if found.answer is not None and not had_answer:
                deadline_ns = time.monotonic_ns() + limits.DIAL_BACK_TIMEOUT_NS
            has_all = found.answer is not None and (found.has_dialled_back or not found.answer.is_dialling)
            if self._is_over or has_all:  # The dial may come before the answer.
                break
        if found.answer is None and found.is_connected:
            found.reason = found.reason or "a program there accepts connections but does not answer as a master"
        return found

    def _on_monitor(self) -> None:
        kind, value = take_event(self._monitor)
        what, found = _EVENTS[kind], self._found
        if what == "connected":
            found.is_connected = True
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(value)) as connection:
                found.local_host = plain_host(connection.getsockname()[0])
                found.round_trip_ns, found.mtu = round_trip_ns(connection), mtu_of(connection)
        elif what == "admitted":
            found.asked_ns = time.time_ns()
            self._socket.send(encode(CheckRequest(self._port, self._token)))
        elif found.answer is None:
            found.reason = found.reason or self._why_refused(is_known=what == "not allowed")
            self._is_over = True

    def _on_message(self) -> None:
        found, now_ns = self._found, time.time_ns()
        try:
            message = decode_master_message(self._socket.recv())
        except OtherVersion as error:
            found.reason = (
                f"it speaks protocol version {error.version}, this host {limits.PROTOCOL_VERSION}; "
                "install the same zpccl on both sides"
            )
            self._is_over = True
        except ProtocolViolation as error:
            found.reason, self._is_over = f"the program there is not a master: {error.message}", True
        else:
            if isinstance(message, CheckAnswer) and not is_host(message.host):
                found.reason, self._is_over = "the program there is not a master: it sees no address", True
            elif isinstance(message, CheckAnswer):
                found.answer = message
                found.clock_ahead_ns = message.unix_ms * limits.MS - (found.asked_ns + now_ns) // 2

    def _on_visitor(self, poller: zmq.Poller) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            visitor, _ = self._listener.accept()
            if len(self._visitors) >= limits.DIAL_BACKS_MAX:  # Strangers dialled.
                self._end_visit(self._visitors[0], poller)
            self._visitors.append(visitor)
            visitor.setblocking(False)
            poller.register(visitor, zmq.POLLIN)
            visitor.send(self._token[:TOKEN_HALF_BYTES])

    def _on_echo(self, visitor: socket.socket, poller: zmq.Poller) -> None:
        with contextlib.suppress(OSError):
            if visitor.recv(TOKEN_HALF_BYTES) == self._token[TOKEN_HALF_BYTES:]:
                self._found.has_dialled_back = True
        self._end_visit(visitor, poller)

    def _end_visit(self, visitor: socket.socket, poller: zmq.Poller) -> None:
        poller.unregister(visitor)
        self._visitors.remove(visitor)
        visitor.close()

    def _why_refused(self, *, is_known: bool) -> str:
        if is_known:
            return "it does not allow the key of this peer; is its public key in the allow list of the master?"
        if not self._found.is_connected:
            return ""
        try:
            timeout_s = limits.CONNECT_TIMEOUT_NS / limits.SECOND
            mechanism = asyncio.run(asyncio.wait_for(mechanism_of(*parse_address(self._address)), timeout_s))
        except (OSError, asyncio.TimeoutError):
            mechanism = ""
        if mechanism == "CURVE" and self._keys is None:
            return "the run has a secret and this host has none; set ZPCCL_SECRET or ZPCCL_SECRET_FILE to it"
        if mechanism == "CURVE":
            return "its secret or key differs from that of this host; compare ZPCCL_SECRET or ZPCCL_MASTER_KEY"
        if mechanism == "NULL" and self._keys is not None:
            return "this host has a secret and the master there has none; start it with the same, or unset ZPCCL_SECRET"
        return "the program there does not speak ZeroMQ"


def is_host(host: str) -> bool:
    """True for an address as masters tell it, or "". Anything else may be a command: a fix to copy contains it."""
    try:
        return not host or parse_address(format_address(host, 0))[0] == host
    except InvalidArgument:
        return False


def ask(address: str, keys: PeerKeys | None, listener: socket.socket | None, port: int) -> Reached:
    """Asks one master. libzmq dials only one address of a name, so a name is tried as by peers: IPv6, then IPv4.

    The arguments are those of `MasterProbe`.
    """
    found = Reached()
    for is_ipv6 in (True, False) if is_name(address) else (True,):
        with MasterProbe(address, keys, listener, port, is_ipv6=is_ipv6) as probe:
            found = probe.run()
        if found.is_connected:
            break
    if found.answer is None:
        found.reason = found.reason or _why_unreached(address)
    return found


def _why_unreached(address: str) -> str:
    """Finds out why there was no connection, which libzmq does not report."""
    try:
        socket.create_connection(parse_address(address), limits.CONNECT_TIMEOUT_NS / limits.SECOND).close()
    except OSError as error:
        return str(error.strerror or error)
    except UnicodeError as error:  # A label of the name is empty or too long.
        return f"it has no valid host name: {error}"
    return "it did not answer in time"


def mtu_of(connection: socket.socket) -> int:
    """The MTU of the path of a connection, as far as the kernel knows; 0 if the kernel does not report it."""
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    with contextlib.suppress(OSError):
        return connection.getsockopt(socket.IPPROTO_IPV6, _IPV6_MTU)
    return 0


# --- Findings -------------------------------------------------------------------------------------------------------


def judge(address: str, found: Reached, own: tuple[str, ...], ports: range, advertise: str) -> list[Finding]:
    """The findings on one master.

    Args:
        address: address of the master.
        found: results of the checks with it.
        own: the addresses of this host at which a peer would listen, without `advertise`.
        ports: the ports on which peers of this host listen.
        advertise: the address that others are told in addition, or "".
    """
    if found.answer is None:
        text = f"no master at {address}: {found.reason}"
        port = parse_address(address)[1]
        everywhere = "[::]" if address.startswith("[") else "0.0.0.0"
        fix = f"on the host of the master: zpccl-master --bind {everywhere}:{port}, and let TCP port {port} through"
        return [Finding("master", Level.PROBLEM, text, "" if found.is_connected else fix)]
    trip = f"{digits(found.round_trip_ns / limits.MS)} ms" if found.round_trip_ns else "an unknown time"
    interface = interface_of(found.local_host) or "no interface"
    findings = [
        Finding(
            "master",
            Level.OK,
            f"{address} answers; round trip {trip}, from {found.local_host} ({interface}) of this host",
        )
    ]
    findings += [_judge_nat(found, found.answer, own, advertise)]
    if own:  # Otherwise nothing listens here.
        findings += [_judge_port(found, found.answer, ports, own, advertise)]
    return [*findings, _judge_mtu(found), _judge_clock(found)]


def _judge_nat(found: Reached, answer: CheckAnswer, own: tuple[str, ...], advertise: str) -> Finding:
    hosts = {parse_address(address)[0] for address in own} | {found.local_host}
    if answer.host in hosts:
        return Finding("NAT", Level.OK, f"the master sees {answer.host}, an address of this host")
    text = f"this host is behind NAT: the master sees {answer.host or 'no address'}, it has {', '.join(sorted(hosts))}"
    if found.has_dialled_back:
        return Finding("NAT", Level.OK, f"{text}; the data port is forwarded")
    if advertise:
        return Finding("NAT", Level.WARNING, f"{text}; others are told {advertise}")
    return Finding("NAT", Level.WARNING, text, "forward a port of the router to this host: see the data port")


def _judge_port(found: Reached, answer: CheckAnswer, ports: range, own: tuple[str, ...], advertise: str) -> Finding:
    name, port = "data port", parse_address(advertise)[1] if advertise else ports.start
    at = format_address(answer.host, port)
    if found.has_dialled_back:
        return Finding(name, Level.OK, f"the master has reached {at}")
    if not answer.is_dialling:
        text = "the master did not dial back: too many hosts ask it, or this one did less than a second ago"
        return Finding(name, Level.WARNING, text, "zpccl doctor    # again, in some seconds")
    hosts = {parse_address(address)[0] for address in own}
    listens_elsewhere = answer.host == found.local_host and answer.host not in hosts  # listen= names another address.
    if answer.host not in addresses_of(parse_address(advertise)[0]) if advertise else listens_elsewhere:
        text = f"{advertise or own[0]} was not tried: the master dials {answer.host} only, the address that it sees"
        return Finding(name, Level.WARNING, text)
    text = f"the master cannot open a connection to {at}: this host works only with peers that it can dial"
    if answer.host in hosts and port not in ports:
        text += f"; peers of this host listen on other ports, from {ports.start} to {ports.stop - 1}"
        return Finding(
            name, Level.PROBLEM, text, f"zpccl doctor --advertise {answer.host}    # the port of the listener"
        )
    if answer.host in hosts:
        return Finding(name, Level.PROBLEM, f"{text}; a firewall drops or refuses it", open_command(ports))
    fix = (
        f"forward TCP port {port} of {answer.host} to {format_address(found.local_host, ports.start)} in the router; "
        f"then export ZPCCL_ADVERTISE={at}"
    )
    return Finding(name, Level.PROBLEM, f"{text}, and with those behind the same NAT", fix)


def open_command(ports: range) -> str:
    """The command that opens ports in the firewall of this host, for the tool that is installed."""
    first, last = ports.start, ports.stop - 1
    if shutil.which("ufw"):
        return f"ufw allow {first}:{last}/tcp"
    if shutil.which("firewall-cmd"):
        return f"firewall-cmd --permanent --add-port={first}-{last}/tcp && firewall-cmd --reload"
    if shutil.which("nft"):
        return (
            f"nft insert rule inet filter input tcp dport {first}-{last} accept    "
            "# or the table and chain that `nft list ruleset` shows; and the firewall of the cloud, if there is one"
        )
    return (
        f"iptables -I INPUT -p tcp --dport {first}:{last} -j ACCEPT    # and the firewall of the cloud, if there is one"
    )


def _judge_mtu(found: Reached) -> Finding:
    if not found.mtu:
        return Finding("MTU", Level.WARNING, "the kernel does not tell the MTU of the route to the master")
    text = f"{found.mtu} bytes on the route to the master, as far as the kernel knows"
    if found.mtu >= limits.ROUTE_MTU_BYTES:
        return Finding("MTU", Level.OK, text)
    interface = interface_of(found.local_host) or "DEVICE"
    fix = f"ip link set dev {interface} mtu 1500    # if its network carries that; else look at the tunnel"
    return Finding("MTU", Level.WARNING, f"{text}: so small packets cost rate", fix)


def _judge_clock(found: Reached) -> Finding:
    ahead_s = found.clock_ahead_ns / limits.SECOND
    text = f"the clock of the master is {abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} this one"
    if abs(found.clock_ahead_ns) <= limits.CLOCK_DIFFERENCE_MAX_NS:
        return Finding("clock", Level.OK, text)
    return Finding("clock", Level.WARNING, f"{text}: their logs cannot be compared", "timedatectl set-ntp true")
