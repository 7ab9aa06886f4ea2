"""Chooses between netem and the emulator."""

from __future__ import annotations

from wan.emulated import EmulatedNetwork
from wan.netem import NetemNetwork, netem_available
from wan.settings import Settings
from wan.wide import WideNetwork

BACKENDS = ("auto", "emulator", "netem")


def make_network(settings: Settings, backend: str = "auto", seed: int = 0) -> WideNetwork:
    """Makes a network with `backend`; "auto": with netem if the kernel has it, else with the emulator.

    Args:
        settings: of the network.
        backend: of BACKENDS.
        seed: of the emulator's losses and jitter; netem has none.

    Raises:
        NetworkUnavailable: this process cannot make it.
    """
    if backend == "netem" or (backend == "auto" and netem_available()):
        return NetemNetwork(settings)
    return EmulatedNetwork(settings, seed)
