"""Addresses: parsing of "host:port" and "[ipv6]:port", listening sockets, and the addresses of this host.

Peers of one host connect over a Unix-domain socket, which costs less than TCP.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import ifaddr

from zpccl import limits
from zpccl.engine.engine import check_shared_memory
from zpccl.errors import InvalidArgument, InvalidUsage

logger = logging.getLogger("zpccl.links")

_NEVER = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of bind() that any other port would also give."""
_SO_PASSRIGHTS = 83
"""From <asm-generic/socket.h>, Linux 6.16; the socket module has no name for it."""
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.@-]+)?)\]|(?P<host>[\w.-]+)):(?P<port>\d{1,5})\Z", re.ASCII)


def parse_address(text: str, *, what: str = "address") -> tuple[str, int]:
    """Host and port of "host:port" or "[ipv6]:port". Port 0 means any.

    Raises:
        InvalidArgument: the text is not of this form, or longer than any address.
    """
    if len(str(text)) > limits.ADDRESS_CHARS_MAX:
        raise InvalidArgument(f"{what} {text!r} has more than {limits.ADDRESS_CHARS_MAX} characters")
    match = _ADDRESS.match(str(text))
    if match is None or int(match["port"]) > 65535 or not _is_ipv6(match["v6"] or "::"):
        raise InvalidArgument(f'{what} {text!r} is not of the form "host:port" or "[ipv6]:port", up to port 65535')
    return match["v6"] or match["host"], int(match["port"])


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.IPv6Address(text) is not None
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """The inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """The address of an end of a connection, as people write it: a socket of IPv6 adds a prefix to an IPv4 address."""
    return host.removeprefix("::ffff:")


def other_end(connection: socket.socket) -> str:
    """The address of the other end of a connection, "host:port".

    Raises:
        OSError: it is not connected any more.
    """
    host, port = connection.getpeername()[:2]
    return format_address(plain_host(host), port)


def parse_masters(text: str) -> tuple[str, ...]:
    """The addresses of a list "host:port,host:port", the first one first.

    Raises:
        InvalidArgument: it is malformed, too long, or names an address twice.
    """
    addresses = []
    for part in str(text).split(","):
        host, port = parse_address(part.strip(), what="master address")
        if port == 0:
            raise InvalidArgument(f"master address {part!r} has no port")
        addresses.append(format_address(host, port))
    if len(addresses) > limits.MASTERS_MAX:
        raise InvalidArgument(f"{len(addresses)} masters; at most {limits.MASTERS_MAX} are allowed")
    if len(set(addresses)) < len(addresses):
        raise InvalidArgument(f"the list of masters {text!r} names one twice")
    return tuple(addresses)


def is_loopback(host: str) -> bool:
    """True if only this host can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_name(address: str) -> bool:
    """True if the host of "host:port" is a name, which may have several addresses."""
    try:
        ipaddress.ip_address(parse_address(address)[0])
    except ValueError:
        return True
    return False


def addresses_of(host: str) -> set[str]:
    """The addresses that this host resolves a name to, none if it cannot. An address resolves to itself."""
    try:
        return {str(target[0]) for *_, target in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


def parse_listen(text: str | None) -> tuple[str, range]:
    """Host and ports of a `listen=` option: "host", "host:port", "host:first-last"; "" as host means all interfaces.

    Raises:
        InvalidArgument: the text is not of this form.
    """
    if not text:
        return "", range(limits.PEER_PORT_FIRST, limits.PEER_PORT_FIRST + limits.PEER_PORT_COUNT)
    text = str(text)
    host, separator, ports = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not separator:
        if re.fullmatch(r"[\d-]+", text):
            raise InvalidArgument(f'listen {text!r} is not of the form "host:port" or "host:first-last"; try ":{text}"')
        host, ports = text, f"{limits.PEER_PORT_FIRST}-{limits.PEER_PORT_FIRST + limits.PEER_PORT_COUNT - 1}"
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", ports)
    if match is None or int(match[2] or match[1]) > 65535 or int(match[2] or match[1]) < int(match[1]):
        raise InvalidArgument(f'listen {text!r} is not of the form "host:port" or "host:first-last", up to port 65535')
    if ":" in host and not host.startswith("["):
        raise InvalidArgument(f'listen {text!r} has an IPv6 address without brackets; write "[ipv6]:port" or "[ipv6]"')
    return host.strip("[]"), range(int(match[1]), int(match[2] or match[1]) + 1)


def listen_on_first_free(host: str, ports: range) -> socket.socket:
    """A non-blocking listening socket on the first free port; on all interfaces, IPv4 and IPv6, if `host` is "".

    Raises:
        InvalidArgument: the host is not an address of this machine.
        InvalidUsage: no port of the range is free.
    """
    for port in ports:
        try:
            return _listen(host, port)
        except (PermissionError, UnicodeError) as error:  # UnicodeError: a label of the name is empty or too long.
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgument(f"cannot listen on {format_address(host, port)}: {reason}") from error
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno in _NEVER:
                is_strange = error.errno == errno.EADDRNOTAVAIL
                reason = "this host has no such address" if is_strange else error.strerror
                raise InvalidArgument(f"cannot listen on {host!r}: {reason}") from error
    raise InvalidUsage(
        f"no free port from {ports.start} to {ports.stop - 1} to listen on; set others by listen= or ZPCCL_LISTEN"
    )


def _listen(host: str, port: int) -> socket.socket:
    if not host:
        try:
            return _bind(socket.AF_INET6, ("::", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # Of another port, both versions may be free.
                raise
        return _bind(socket.AF_INET, ("0.0.0.0", port))
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return _bind(family, address)


def _bind(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        listener.bind(address)
        listener.listen(limits.LISTEN_BACKLOG)
        listener.setblocking(False)
        return listener
    except OSError:
        listener.close()
        raise


def bind_beside(connection: socket.socket, listener: socket.socket) -> None:
    """Binds a socket to the port of a listener, to dial from there. Only processes of this user can share that port.

    Raises:
        OSError: the system has no SO_REUSEPORT, or the listener is bound to an address of another family.
    """
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::" if connection.family == socket.AF_INET6 else "0.0.0.0"
    for one in (listener, connection):  # Only now: set before bind(), it would let two listeners share one port.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    connection.bind((host, port))


def local_address(peer_id: bytes) -> str:
    """Where processes of the same host reach a peer: the abstract name of a Unix-domain socket, which begins with NUL.

    The name is derived from the random peer id, so nobody has to send it, and no peer can make another one connect to
    the socket of some other program. On another host, or in another network namespace, the socket does not exist.
    """
    return f"\0zpccl/{peer_id.hex()}"


def is_local_address(address: str) -> bool:
    """True for what `local_address` returns."""
    return address.startswith("\0")


def listen_locally(peer_id: bytes) -> socket.socket | None:
    """A non-blocking socket that listens at the local address of a peer.

    None where there are no abstract names, or where a sandbox or a limit forbids a step. The log says which.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        check_shared_memory()  # Peers that find the socket expect shared memory behind it.
        with contextlib.ExitStack() as on_failure:
            listener = on_failure.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            let_pass_descriptors(listener, allowed=False)
            listener.bind(local_address(peer_id))
            listener.listen(limits.LISTEN_BACKLOG)
            listener.setblocking(False)
            on_failure.pop_all()
            return listener
    except OSError as error:
        logger.info("peers of this host are reached over TCP, not shared memory: %s", error)
        return None


def let_pass_descriptors(connection: socket.socket, *, allowed: bool) -> None:
    """Sets whether the other end of a Unix-domain socket may pass descriptors; a listener's connections inherit it.

    The other end may once it has proved who it is. A stranger could pass a descriptor that takes forever to close, in
    our thread.
    """
    if connection.family == socket.AF_UNIX:
        with contextlib.suppress(OSError):  # Linux before 6.16 lacks the option: everybody may.
            connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, allowed)


def advertised_address(advertise: str, port: int) -> str:
    """The address of an `advertise=` option: a "host" without a port gets the port of the listener.

    Raises:
        InvalidArgument: it is malformed, or its port is 0.
    """
    is_whole = _ADDRESS.match(str(advertise)) is not None
    address = str(advertise) if is_whole else format_address(str(advertise).strip("[]"), port)
    try:
        advertised_port = parse_address(address)[1]
    except InvalidArgument as error:
        raise InvalidArgument(f'advertise {advertise!r} is not of the form "host" or "host:port"') from error
    if advertised_port == 0:
        raise InvalidArgument(f"advertise {advertise!r} has port 0, at which no peer can be reached")
    return address


def reachable_at(listener: socket.socket, advertise: str | None, masters: Sequence[str] = ()) -> tuple[str, ...]:
    """Addresses at which others may reach a listener, the most likely one first.

    The order: the advertised one; the source address of packets to a master; loopback and the addresses of the other
    interfaces; last those of bridges, which mostly lead to containers of this host.

    Args:
        listener: the listening socket.
        advertise: an address that the user has named.
        masters: addresses of the masters, "host:port".

    Raises:
        InvalidArgument: `advertise` is malformed.
    """
    host, port = listener.getsockname()[:2]
    addresses = [advertised_address(advertise, port)] if advertise else []
    if not ipaddress.ip_address(host).is_unspecified:
        addresses.append(format_address(host, port))
    else:
        likely = next((host for host in map(source_towards, masters) if host), "")
        found = {
            host: _is_bridge(name)
            for name, host in interface_addresses()
            if not ipaddress.ip_address(host).is_link_local
            and (host != "::1" or host == likely)
            and (listener.family == socket.AF_INET6 or ":" not in host)
        }
        hosts = sorted(found, key=lambda host: (host != likely, found[host], not is_loopback(host), ":" in host))
        addresses += [format_address(host, port) for host in hosts]
    return tuple(dict.fromkeys(addresses))[: limits.ADDRESSES_PER_PEER_MAX - 1]


def source_towards(address: str) -> str:
    """The source address of packets from this host to `address`; "" if there is no route. Sends nothing."""
    try:
        host, port = parse_address(address)
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (InvalidArgument, OSError, UnicodeError):
        return ""


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Name of interface and address, for each address of this host."""
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            yield str(adapter.name), ip.ip if isinstance(ip.ip, str) else ip.ip[0]


def _is_bridge(interface: str) -> bool:
    return Path(f"/sys/class/net/{interface}/bridge").is_dir()
