"""Networks for tests in which some hosts are behind NATs of their own. Linux, as root, with nftables.

    host --- core --- other hosts                       other hosts see the host's own address
    host --- NAT --- core                               other hosts see the address of the NAT

A NAT forwards what a host sends, and the replies; it drops everything else silently. It keeps ports where they are
free, so that two such hosts can open a connection together, or it takes random ports, so that they cannot.
"""

from __future__ import annotations

import ipaddress
import shutil
import subprocess
from pathlib import Path

from networks import DEVICE, Namespaces, NetworkUnavailable, wait_for_link

from e2e.networks import or_skip

_RULES = """
table inet nat {
    chain leaving { type nat hook postrouting priority srcnat; oifname "wan" masquerade %s; }
    chain arriving { type filter hook input priority filter; iifname "wan" ct state new drop; }
    chain passing { type filter hook forward priority filter; iifname "wan" ct state new drop; }
}
"""


class NatNetwork(Namespaces):
    """Hosts around a core, some of them behind NATs.

    Args:
        host_count: number of hosts.
        natted: the hosts that are behind a NAT.
        is_ipv6: True for an IPv6 network, False for an IPv4 one.
        keeps_ports: True if the NATs keep the ports of hosts, False if they take random ports.

    Raises:
        NetworkUnavailable: not permitted, or no `ip` or `nft` command.
    """

    def __init__(
        self, host_count: int, natted: frozenset[int], *, is_ipv6: bool = False, keeps_ports: bool = False
    ) -> None:
        if shutil.which("nft") is None:
            raise NetworkUnavailable("there is no nft command")
        self._natted = sorted(natted)
        self._is_ipv6 = is_ipv6
        self._rules = _RULES.replace("%s", "" if keeps_ports else "fully-random")
        super().__init__(host_count, other_count=1 + len(natted))

    def address(self, host: int) -> str:
        """The address by which others know a host: its own or that of its NAT. An IPv6 address is in brackets."""
        return f"[{self._outer(host)}2]" if self._is_ipv6 else f"{self._outer(host)}2"

    def _outer(self, host: int) -> str:
        return f"2001:db8:0:{host + 1:x}::" if self._is_ipv6 else f"10.1.{host}."

    def _inner(self, host: int) -> str:
        return f"fd00:0:0:{host + 1:x}::" if self._is_ipv6 else f"192.168.{host}."

    def _set_up(self) -> None:
        core = self._path(self.host_count)
        self._run(core, _forward)
        self._ip(core, ["link set lo up"])
        for host in range(self.host_count):
            self._ip(self.namespace(host), ["link set lo up"])
            if host not in self._natted:
                self._join(self.namespace(host), DEVICE, core, f"host{host}", self._outer(host))
                continue
            nat = self._path(self.host_count + 1 + self._natted.index(host))
            self._run(nat, _forward)
            self._ip(nat, ["link set lo up"])
            self._join(nat, "wan", core, f"host{host}", self._outer(host))
            self._join(self.namespace(host), DEVICE, nat, "lan", self._inner(host))
            self._run(nat, self._translate)

    def _join(self, host: str, device: str, router: str, port: str, prefix: str) -> None:
        """Connects a namespace to its router: the router is the first of their subnet, the namespace the second."""
        length = 64 if ipaddress.ip_address(f"{prefix}1").version == 6 else 24
        nodad = " nodad" if length == 64 else ""
        self._ip(
            host,
            [
                f"link add {device} type veth peer name {port} netns {router}",
                f"address add {prefix}2/{length} dev {device}{nodad}",
                f"link set {device} up",
            ],
        )
        self._ip(router, [f"address add {prefix}1/{length} dev {port}{nodad}", f"link set {port} up"])
        self._ip(host, [f"route add default via {prefix}1"])
        self._run(host, lambda: wait_for_link(device))  # Earlier packets would be dropped, and TCP would back off.
        self._run(router, lambda: wait_for_link(port))

    def _translate(self) -> None:
        subprocess.run(["nft", "-f", "-"], input=self._rules, text=True, check=True, capture_output=True)


def _forward() -> None:
    for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
        Path("/proc/sys/net", name).write_text("1", encoding="ascii")


def nat_hosts(count: int, *natted: int, is_ipv6: bool = False, keeps_ports: bool = False) -> NatNetwork:
    """A network of hosts, or a skipped test."""
    return or_skip(lambda: NatNetwork(count, frozenset(natted), is_ipv6=is_ipv6, keeps_ports=keeps_ports))
