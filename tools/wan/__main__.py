"""An emulated wide-area network of virtual hosts on this machine, to run programs in. Linux, as root; see README.md.

    python tools/wan 3 tools/wan/example.conf       makes a network of 3 hosts; prints how to run a command on each

It reads lines from standard input until Ctrl-C. A line of settings (settings.py) changes the network. Other lines:

    show                  prints all settings
    stats                 prints the counters; "reset" sets them to 0
    congestion cubic      sets the congestion control of new TCP connections

When this process ends, in whatever way, only processes that were started inside the network are left.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # As Python does for the scripts there.

from common import run_tool, say, whole
from networks import NetworkUnavailable

from wan.emulated import HOSTS_MAX, EmulatedNetwork
from wan.settings import Settings, SettingsError


def obey(network: EmulatedNetwork, line: str) -> None:
    """Carries out one line.

    Raises:
        SettingsError, OSError, NetworkUnavailable: the line cannot be carried out.
    """
    command, _, argument = line.strip().partition(" ")
    if command == "show":
        print("\n".join(network.settings.lines()))
    elif command == "stats":
        print(network.report())
    elif command == "reset":
        network.reset_counts()
    elif command == "congestion":
        network.use_congestion_control(argument.strip())
    else:
        network.change(line)


def run_network(options: argparse.Namespace) -> int:
    """Makes the network, and keeps it until Ctrl-C."""
    try:
        lines = options.settings.read_text(encoding="utf-8").splitlines() if options.settings else []
        settings = Settings(options.hosts).with_lines(lines)
    except (SettingsError, OSError, UnicodeDecodeError) as error:
        say(f"{options.settings}: {error}")
        return 1
    with EmulatedNetwork(settings, options.seed) as network:
        for host in range(options.hosts):
            print(f"host {host}, {network.address(host)}: nsenter --net={network.namespace(host)} COMMAND", flush=True)
        for line in sys.stdin:
            try:
                obey(network, line)
            except (SettingsError, OSError, NetworkUnavailable) as error:
                say(f"nothing changed: {error}")
            sys.stdout.flush()
        signal.pause()
    return 0


def main() -> int:
    """Runs the command; returns its exit status."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/wan", description=__doc__, formatter_class=form)
    parser.add_argument("hosts", type=whole(2, HOSTS_MAX), help=f"2 to {HOSTS_MAX}")
    parser.add_argument("settings", type=Path, nargs="?", help="a file of lines")
    parser.add_argument("--seed", type=int, default=0, help="seed of losses and jitter (default 0)")
    options = parser.parse_args()
    return run_tool(lambda: run_network(options))


if __name__ == "__main__":
    sys.exit(main())
