"""A wide-area network by the kernel's queueing disciplines netem and HTB.

Hosts and router are those of `networks.Network`. The router's device towards a host has one HTB class per sender for
the rate of the path, with a netem queue in it for delay and loss; their parent class has the host's ingress rate. The
egress rate of a host is an HTB class on its own device. GSO is switched off, because netem would drop a super-packet as
a whole.

Differences from the emulator: delay is applied before the rate; jitter reorders packets; losses have no seed.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from networks import DEVICE, Network, NetworkUnavailable

from wan.settings import Settings
from wan.wide import WideNetwork

UNLIMITED_MBIT = 100_000.0
"""HTB has no unlimited rate; this stands for it."""
SHARED_MBIT = 1.0
"""Guaranteed share of a path in a host's ingress rate; HTB lends the rest to the classes that need it."""
MTU_BYTES = 1500
QUEUE_PACKETS_MIN = 1000
_HOST_CLASS = "1:ffff"


def netem_available() -> bool:
    """True if the kernel has netem and HTB, and this process may use them."""

    def probe() -> bool:
        commands = "qdisc add dev lo root handle 1: htb\nqdisc replace dev lo root netem delay 1ms\n"
        tried = subprocess.run(["tc", "-batch", "-"], input=commands, text=True, check=False, capture_output=True)
        return tried.returncode == 0

    try:
        with Network(1) as network:
            return network.run(0, probe)
    except (NetworkUnavailable, OSError):
        return False


def first_commands(settings: Settings, receiver: int, address: Callable[[int], str]) -> list[str]:
    """Commands for `tc` that make the disciplines of the router's device towards a host; to be run once."""
    device = f"host{receiver}"
    commands = [f"qdisc add dev {device} root handle 1: htb"]
    for sender in (one for one, other in settings.paths if other == receiver):
        match = f"u32 match ip src {address(sender)}/32"
        commands.append(f"filter add dev {device} parent 1: protocol ip prio 1 {match} flowid 1:{sender + 1:x}")
    return commands


def receiver_commands(settings: Settings, receiver: int) -> list[str]:
    """Commands for `tc` that apply the settings to the router's device towards a host; may be repeated."""
    device = f"host{receiver}"
    ingress = settings.hosts[receiver].ingress_mbit
    whole = _rate(ingress)
    commands = [f"class replace dev {device} parent 1: classid {_HOST_CLASS} htb rate {whole} ceil {whole}"]
    for (sender, other), path in settings.paths.items():
        if other != receiver:
            continue
        number = f"{sender + 1:x}"
        ceiling = _rate(path.rate_mbit)
        sure = _rate(SHARED_MBIT) if ingress else ceiling
        commands.append(
            f"class replace dev {device} parent {_HOST_CLASS} classid 1:{number} htb rate {sure} ceil {ceiling}"
        )
        commands.append(
            f"qdisc replace dev {device} parent 1:{number} handle {0x10 + sender:x}: {_netem(settings, sender, other)}"
        )
    return commands


def sender_commands(settings: Settings, sender: int) -> list[str]:
    """Commands for `tc` that set the egress rate of a host; may be repeated."""
    rate = _rate(settings.hosts[sender].egress_mbit)
    return [
        f"class replace dev {DEVICE} parent 1: classid 1:1 htb rate {rate} ceil {rate}",
    ]


def _netem(settings: Settings, sender: int, receiver: int) -> str:
    path = settings.paths[sender, receiver]
    rate_mbit = path.rate_mbit or UNLIMITED_MBIT
    under_way_bytes = rate_mbit * 1e6 / 8 * (path.delay_ms + path.jitter_ms) / 1e3
    packets = max(QUEUE_PACKETS_MIN, round((under_way_bytes + path.queue_bytes_or_default) / MTU_BYTES))
    text = f"netem limit {packets} delay {path.delay_ms:g}ms"
    if path.jitter_ms:
        text += f" {path.jitter_ms:g}ms"
    if path.cut or settings.hosts[sender].down or settings.hosts[receiver].down:
        return text + " loss random 100%"
    if path.loss and path.loss_run > 1:  # Gilbert model: the probabilities that a loss run begins and ends, in percent.
        begin = min(1.0, path.loss / (path.loss_run * (1 - path.loss))) if path.loss < 1 else 1.0
        return text + f" loss gemodel {100 * begin:.6f}% {100 / path.loss_run:.6f}%"
    return text + f" loss random {100 * path.loss:.6f}%"


def _rate(mbit: float) -> str:
    return f"{(mbit or UNLIMITED_MBIT) * 1e6:.0f}bit"


class NetemNetwork(WideNetwork, Network):
    """A wide-area network by netem and HTB.

    Args:
        settings: of the network.

    Raises:
        NetworkUnavailable: not permitted, or no `ip` or `tc` command, or a kernel without netem.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        Network.__init__(self, settings.host_count)

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        return Network.address(self, host)

    def configure(self, settings: Settings) -> None:
        """Applies settings, one device after the other."""
        assert settings.host_count == self.host_count
        for host in range(self.host_count):
            self._batch("tc", self._router, receiver_commands(settings, host))
            self._batch("tc", self.namespace(host), sender_commands(settings, host))
        self.settings = settings

    def report(self) -> str:
        """The kernel's statistics of the disciplines, as text."""

        def show() -> str:
            command = ["tc", "-s", "qdisc", "show"]
            return subprocess.run(command, text=True, check=True, capture_output=True).stdout

        return self._run(self._router, show)

    def use_congestion_control(self, name: str) -> None:
        """Sets the congestion control of new TCP connections over the network; the kernel must have it."""
        for host in range(self.host_count):
            self._ip(self.namespace(host), [f"route replace default via 10.0.{host}.1 congctl {name}"])

    def _set_up(self) -> None:
        Network._set_up(self)
        for host in range(self.host_count):
            self._ip(self.namespace(host), [f"link set {DEVICE} gso_max_segs 1"])
            self._batch("tc", self.namespace(host), [f"qdisc add dev {DEVICE} root handle 1: htb default 1"])
            self._batch("tc", self._router, first_commands(self.settings, host, self.address))
        self.configure(self.settings)
