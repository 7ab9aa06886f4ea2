"""What both kinds of wide-area networks can do: the emulator's and netem's."""

from __future__ import annotations

import abc

from networks import Namespaces

from wan.settings import Settings

CONGESTION_CONTROLS = ("bbr", "cubic", "reno")


class WideNetwork(Namespaces):
    """Hosts with delays, rates, losses and queues between them, which may be changed while they are used."""

    settings: Settings

    @abc.abstractmethod
    def configure(self, settings: Settings) -> None:
        """Makes the network what `settings` say, all at once."""

    @abc.abstractmethod
    def report(self) -> str:
        """What has passed so far, and what not, for people."""

    @abc.abstractmethod
    def use_congestion_control(self, name: str) -> None:
        """Sets what new TCP connections over the network use: of CONGESTION_CONTROLS, as far as the kernel has it."""

    def change(self, *lines: str) -> None:
        """Changes the settings by lines (settings.py), all at once or not at all.

        Raises:
            SettingsError: a line is wrong.
        """
        self.configure(self.settings.with_lines(lines))

    def cut(self, one: int, other: int) -> None:
        """Drops all that two hosts send to each other, and what is under way."""
        self.change(f"link {one} {other} cut=1")

    def cut_one_way(self, sender: int, receiver: int) -> None:
        """Drops what one host sends to another, and not what comes back."""
        self.change(f"path {sender} {receiver} cut=1")

    def cut_host(self, host: int) -> None:
        """Drops all that a host sends and all that is sent to it."""
        self.change(f"host {host} down=1")

    def heal(self) -> None:
        """Undoes all cuts."""
        self.change("path * * cut=0", "host * down=0")
