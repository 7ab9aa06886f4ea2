"""The wide-area network that this kernel can make."""

from __future__ import annotations

from wan.emulated import EmulatedNetwork
from wan.netem import NetemNetwork, netem_available
from wan.settings import Settings
from wan.wide import WideNetwork

BACKENDS = ("auto", "emulator", "netem")


def make_network(settings: Settings, backend: str = "auto", seed: int = 0) -> WideNetwork:
    """A network by netem where the kernel has it, else by the emulator, or by the one that `backend` names.

    Args:
        settings: of the network.
        backend: of BACKENDS.
        seed: of the emulator's losses and jitter; netem has none.

    Raises:
        NetworkUnavailable: this process cannot have it.
    """
    if backend == "netem" or (backend == "auto" and netem_available()):
        return NetemNetwork(settings)
    return EmulatedNetwork(settings, seed)
