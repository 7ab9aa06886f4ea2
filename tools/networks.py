"""Virtual networks of hosts on this machine, with paths that can be cut, for tests and tools. Linux, as root.

Each host is a network namespace with one address. In a `Network` they are joined by a router, which is also a
namespace. On a cut path the router drops packets silently, like a broken path of the internet: without RST or ICMP
messages. `wan.emulated` makes networks with delays, rates and losses.

Ownership: this process owns one descriptor per namespace. Namespaces have no names and no files. So the kernel removes
them and their devices once these descriptors are closed and the processes inside have ended, however this process ends.
Commands run in separate threads that enter a namespace and then end; no other thread of this process leaves its
namespace.
"""

from __future__ import annotations

import abc
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

HOSTS_MAX = 250
DEVICE = "eth0"
"""The name of each host's network device."""
LINK_TIMEOUT_S = 10.0
"""Timeout for a new device to come up."""
_RTMGRP_LINK, _SIOCGIFFLAGS, _IFF_RUNNING = 1, 0x8913, 0x40  # linux/rtnetlink.h, sockios.h, if.h
_CLONE_NEWNET = 0x40000000  # linux/sched.h; the os module has it from Python 3.12 on only.
_libc = ctypes.CDLL(None, use_errno=True)


class NetworkUnavailable(Exception):
    """This process is not permitted to make networks, or a program for it is missing."""


def enter(namespace: str) -> None:
    """Moves the calling thread, and threads and processes it starts later, into a namespace (`Network.namespace`)."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(descriptor, _CLONE_NEWNET) < 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


class Namespaces(abc.ABC):
    """Hosts numbered from 0. A subclass connects them in `_set_up`.

    Args:
        host_count: 1 to HOSTS_MAX.
        other_count: additional namespaces, such as routers.

    Raises:
        NetworkUnavailable: not permitted, or no `ip` command.
    """

    def __init__(self, host_count: int, other_count: int = 0) -> None:
        assert 1 <= host_count <= HOSTS_MAX
        self.host_count = host_count
        self._descriptors: list[int] = []
        try:
            for _ in range(host_count + other_count):
                self._descriptors.append(_in_thread(_new_namespace))
            self._set_up()
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            text = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            raise NetworkUnavailable(f"cannot make network namespaces: {text}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the namespaces, which end with the last process inside. May be called twice."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    @abc.abstractmethod
    def address(self, host: int) -> str:
        """The IPv4 address of a host."""

    def namespace(self, host: int) -> str:
        """The path of a host's namespace for `enter`, valid for processes of the same user while this process lives."""
        assert 0 <= host < self.host_count
        return self._path(host)

    def run(self, host: int, function: Callable[[], T]) -> T:
        """Runs a function in a thread on a host: its sockets and the processes that it starts belong to that host."""
        return self._run(self.namespace(host), function)

    @abc.abstractmethod
    def _set_up(self) -> None:
        """Connects the namespaces."""

    def _path(self, index: int) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptors[index]}"

    def _ip(self, namespace: str, commands: Sequence[str]) -> None:
        """Runs several commands of `ip` in one batch."""

        def run() -> None:
            text = "".join(f"{command}\n" for command in commands)
            subprocess.run(["ip", "-batch", "-"], input=text, text=True, check=True, capture_output=True)

        if commands:
            self._run(namespace, run)

    def _run(self, namespace: str, function: Callable[[], T]) -> T:
        def inside() -> T:
            enter(namespace)
            return function()

        return _in_thread(inside)


class Network(Namespaces):
    """Hosts and a router between them.

    Args:
        host_count: 1 to HOSTS_MAX.

    Raises:
        NetworkUnavailable: not permitted, or no `ip` command.
    """

    def __init__(self, host_count: int) -> None:
        self._rules: list[str] = []
        super().__init__(host_count, other_count=1)

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        assert 0 <= host < self.host_count
        return f"10.0.{host}.2"

    def icmp_messages_sent(self) -> int:
        """Number of ICMP messages that the router has sent; it should be 0."""
        return self._run(self._router, lambda: counter("Icmp", "OutMsgs"))

    def run_at_router(self, function: Callable[[], T]) -> T:
        """Runs a function in a thread at the router, whose devices are called host0, host1, ..."""
        return self._run(self._router, function)

    # --- Cutting ----------------------------------------------------------------------------------------------------

    def cut(self, one: int, other: int) -> None:
        """Drops all packets between two hosts."""
        self._add_rules(self._one_way(one, other), self._one_way(other, one))

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """Drops all packets from one host to another, in this direction only."""
        self._add_rules(self._one_way(sender, receiver))

    def cut_host(self, host: int) -> None:
        """Drops all packets from and to a host."""
        self._add_rules(f"from {self.address(host)} blackhole", f"to {self.address(host)} blackhole")

    def heal(self) -> None:
        """Ends all cuts."""
        rules, self._rules = self._rules, []
        self._ip(self._router, [f"rule del {rule}" for rule in rules])

    def _one_way(self, sender: int, receiver: int) -> str:
        return f"from {self.address(sender)} to {self.address(receiver)} blackhole"

    def _add_rules(self, *rules: str) -> None:
        """Adds routing rules. "blackhole" drops forwarded packets without an ICMP message."""
        numbered = [f"priority {100 + len(self._rules) + index} {rule}" for index, rule in enumerate(rules)]
        self._ip(self._router, [f"rule add {rule}" for rule in numbered])
        self._rules += numbered

    # --- Setting up -------------------------------------------------------------------------------------------------

    @property
    def _router(self) -> str:
        return self._path(self.host_count)

    def _set_up(self) -> None:
        def begin() -> None:
            for name, value in (("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/default/rp_filter", "0")):
                Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")

        self._run(self._router, begin)
        router = ["link set lo up"]
        for host in range(self.host_count):
            commands = [
                "link set lo up",
                f"link add {DEVICE} type veth peer name host{host} netns {self._router}",
                f"address add {self.address(host)}/30 dev {DEVICE}",
                f"link set {DEVICE} up",
                f"route add default via 10.0.{host}.1",
            ]
            self._ip(self.namespace(host), commands)
            router += [f"address add 10.0.{host}.1/30 dev host{host}", f"link set host{host} up"]
        self._ip(self._router, router)
        for host in range(self.host_count):  # Earlier packets would be dropped, and TCP would back off.
            self.run(host, lambda: wait_for_link(DEVICE))
            self._run(self._router, lambda host=host: wait_for_link(f"host{host}"))  # type: ignore[misc]


class Alone(Namespaces):
    """One host with only a loopback device, and with ports of its own."""

    def __init__(self) -> None:
        super().__init__(1)

    def address(self, host: int) -> str:
        """The IPv4 address of the host."""
        assert host == 0
        return "127.0.0.1"

    def _set_up(self) -> None:
        self._ip(self.namespace(0), ["link set lo up"])


def counter(protocol: str, name: str) -> int:
    """A counter of the calling thread's network in /proc/net/snmp, such as ("Tcp", "RetransSegs")."""
    lines = Path("/proc/thread-self/net/snmp").read_text(encoding="ascii").splitlines()
    names, values = (line.split() for line in lines if line.startswith(f"{protocol}:"))
    return int(values[names.index(name)])


def wait_for_link(device: str) -> None:
    """Waits for netlink events until a device is up."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as changes:
        changes.bind((0, _RTMGRP_LINK))
        changes.settimeout(LINK_TIMEOUT_S)
        while True:
            request = bytearray(struct.pack("16sh22x", device.encode(), 0))
            fcntl.ioctl(changes, _SIOCGIFFLAGS, request)
            (flags,) = struct.unpack_from("H", request, 16)
            if flags & _IFF_RUNNING:
                return
            changes.recv(65536)


def _new_namespace() -> int:
    if _libc.unshare(_CLONE_NEWNET) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _in_thread(function: Callable[[], T]) -> T:
    """Runs a function in a thread that ends with it."""
    with ThreadPoolExecutor(1, "network") as executor:
        return executor.submit(function).result()
