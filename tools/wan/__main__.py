"""An emulated wide-area network of virtual hosts on this machine, to run programs in. Linux, as root; see README.md.

    python tools/wan up 3 tools/wan/example.conf    makes a network, and keeps it until Ctrl-C or `down`
    python tools/wan exec 0 COMMAND ...             in another terminal: runs a command on host 0
    python tools/wan set "link 0 1 delay_ms=50"     changes settings, all lines at once; syntax: wan/settings.py
    python tools/wan reload                         reads the file again (or SIGHUP), which undoes `set`
    python tools/wan cut 0 1; ... cut 2; ... heal   silently cuts off a pair or a host; ends all cuts
    python tools/wan show; ... stats; ... reset     prints the settings; prints counters; resets counters
    python tools/wan congestion cubic               sets the congestion control of new TCP connections
    python tools/wan down                           ends the network

Ownership: the process of `up` owns the network and a Unix socket. When it ends, however it ends, only processes that
were started inside are left. Its single thread waits for requests and signals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # As Python does for the scripts there.

from networks import NetworkUnavailable, enter

from wan.choose import BACKENDS, make_network
from wan.emulated import EmulatedNetwork
from wan.settings import Settings, SettingsError
from wan.wide import CONGESTION_CONTROLS, WideNetwork

SOCKET = Path("/run/zpccl-wan.sock")
REQUEST_BYTES_MAX = 64 << 10
ANSWER_BYTES_MAX = 128 << 10
ANSWER_TIMEOUT_S = 30.0


class RequestError(Exception):
    """A request cannot be carried out."""


class RequestServer:
    """Applies requests to a network.

    Args:
        network: to be closed by the caller.
        configuration: a file of lines, or None.
    """

    def __init__(self, network: WideNetwork, configuration: Path | None) -> None:
        self.network = network
        self.configuration = configuration
        self.ended = False

    def reload(self) -> str:
        """Reads the file again; if it has an error nothing changes."""
        self.network.configure(read_settings(self.network.host_count, self.configuration))
        return ""

    def answer(self, words: list[str]) -> str:
        """Carries out one request.

        Raises:
            RequestError, SettingsError, OSError: it cannot be carried out.
        """
        network, (command, *arguments) = self.network, words
        if command == "set":
            network.change(*arguments)
        elif command == "reload":
            self.reload()
        elif command == "cut" and len(arguments) in (1, 2):
            hosts = [self._host(text) for text in arguments]
            network.cut_host(hosts[0]) if len(hosts) == 1 else network.cut(*hosts)
        elif command == "heal":
            network.heal()
        elif command == "show":
            return "\n".join(network.settings.lines())
        elif command == "stats":
            return network.report()
        elif command == "reset" and isinstance(network, EmulatedNetwork):
            network.reset_counts()
        elif command == "congestion" and len(arguments) == 1 and arguments[0] in CONGESTION_CONTROLS:
            network.use_congestion_control(arguments[0])
        elif command == "namespace" and len(arguments) == 1:
            return network.namespace(self._host(arguments[0]))
        elif command == "down":
            self.ended = True
        else:
            raise RequestError(f"cannot {command} {' '.join(arguments)} here")
        return ""

    def _host(self, text: str) -> int:
        if not text.isdecimal() or int(text) >= self.network.host_count:
            raise RequestError(f"{text!r} is no host; they are 0 to {self.network.host_count - 1}")
        return int(text)

    def serve(self, connection: socket.socket) -> None:
        """Answers the one request of a connection of the same user, or of root."""
        connection.settimeout(ANSWER_TIMEOUT_S)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user not in (0, os.geteuid()):
            return
        words = connection.recv(REQUEST_BYTES_MAX).decode().split("\0")
        try:
            answer = {"text": self.answer(words)}
        except (RequestError, SettingsError, OSError, subprocess.CalledProcessError) as error:
            answer = {"error": str(error)}
        connection.send(json.dumps(answer).encode())


def read_settings(host_count: int, configuration: Path | None) -> Settings:
    """Reads the settings from a file.

    Raises:
        SettingsError: names the file and the line.
    """
    lines = configuration.read_text(encoding="utf-8").splitlines() if configuration else []
    try:
        return Settings(host_count).with_lines(lines)
    except SettingsError as error:
        raise SettingsError(f"{configuration}, {error}") from error


@contextlib.contextmanager
def signals() -> Iterator[socket.socket]:
    """A socket that receives the number of each signal (terminate, reload) as a byte."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        signal.set_wakeup_fd(theirs.fileno())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        yield ours
        signal.set_wakeup_fd(-1)


@contextlib.contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A Unix packet socket at a path, for this user only.

    Raises:
        RequestError: another network uses the path.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), dialled(path):
            raise RequestError(f"a network is up already at {path}; `down` ends it, --socket names another place")
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        try:
            path.chmod(0o600)
            listener.listen()
            yield listener
        finally:
            path.unlink(missing_ok=True)


def dialled(path: Path) -> socket.socket:
    """A connection to the process of `up`.

    Raises:
        OSError: there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    connection.settimeout(ANSWER_TIMEOUT_S)
    return connection


def run_network(options: argparse.Namespace) -> int:
    """The command `up`."""
    settings = read_settings(options.hosts, options.configuration)
    with (
        listening(options.socket) as listener,
        make_network(settings, options.backend, options.seed) as network,
        signals() as numbers,
    ):
        server = RequestServer(network, options.configuration)
        kind = "the emulator" if isinstance(network, EmulatedNetwork) else "netem"
        addresses = ", ".join(f"{host}: {network.address(host)}" for host in range(network.host_count))
        print(f"up, by {kind}: {addresses}", flush=True)
        watched: list[Any] = [listener, numbers]
        if isinstance(network, EmulatedNetwork):
            watched.append(network)
        while not server.ended:
            ready, _, _ = select.select(watched, [], [])
            if network in ready:
                print("the emulator has died", file=sys.stderr)
                return 1
            if listener in ready:
                with listener.accept()[0] as connection, contextlib.suppress(OSError, UnicodeDecodeError):
                    server.serve(connection)
            if numbers in ready and on_signals(server, numbers.recv(256)):
                break
    return 0


def on_signals(server: RequestServer, numbers: bytes) -> bool:
    """Reloads on SIGHUP; returns True if another signal requests the end."""
    if signal.SIGHUP in numbers:
        try:
            server.reload()
            print("read again", flush=True)
        except (SettingsError, OSError) as error:
            print(f"kept as it was: {error}", file=sys.stderr)
    return any(number != signal.SIGHUP for number in numbers)


def request(path: Path, *words: str) -> str:
    """Sends a request to the process of `up`; returns its answer.

    Raises:
        RequestError: the process is not running, or reports an error.
    """
    try:
        with dialled(path) as connection:
            connection.send("\0".join(words).encode())
            answer = json.loads(connection.recv(ANSWER_BYTES_MAX) or "{}")
    except OSError as error:
        raise RequestError(f"no network is up at {path}: {error}") from error
    if "text" not in answer:
        raise RequestError(answer.get("error", "no answer"))
    return str(answer["text"])


def execute(options: argparse.Namespace) -> int:
    """The command `exec`: replaces this process by the command. Never returns."""
    enter(request(options.socket, "namespace", options.host))
    try:
        os.execvp(options.command[0], options.command)
    except OSError as error:
        raise RequestError(f"cannot run {options.command[0]}: {error.strerror}") from error


def host_count(text: str) -> int:
    """Parses a number of hosts, for argparse."""
    if not text.isdecimal() or not 2 <= int(text) <= 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of hosts from 2 to 16")
    return int(text)


def build_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="tools/wan", description=__doc__, formatter_class=form)
    parser.add_argument("--socket", type=Path, default=SOCKET, help=f"where `up` is reached (default {SOCKET})")
    commands = parser.add_subparsers(dest="name", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="make a network and keep it")
    up.add_argument("hosts", type=host_count, help="2 to 16")
    up.add_argument("configuration", type=Path, nargs="?", help="a file of lines")
    up.add_argument("--backend", choices=BACKENDS, default="auto", help="default auto: netem if the kernel has it")
    up.add_argument("--seed", type=int, default=0, help="of the emulator's losses and jitter (default 0)")
    run = commands.add_parser("exec", help="run a command on a host")
    run.add_argument("host")
    run.add_argument("command", nargs=argparse.REMAINDER)
    commands.add_parser("set", help="change the settings").add_argument("words", nargs="+", metavar="LINE")
    commands.add_parser("cut", help="cut a host or a pair off").add_argument("words", nargs="+", metavar="HOST")
    congestion = commands.add_parser("congestion", help="set the congestion control of new connections")
    congestion.add_argument("words", nargs=1, choices=CONGESTION_CONTROLS)
    for name in ("heal", "reload", "show", "stats", "reset", "down"):
        commands.add_parser(name).set_defaults(words=[])
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.name == "exec" and not options.command:
        parser.error("exec: which command?")
    try:
        if options.name == "up":
            return run_network(options)
        if options.name == "exec":
            return execute(options)
        text = request(options.socket, options.name, *options.words)
    except (RequestError, SettingsError, NetworkUnavailable, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    if text:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
