"""zpccl: the command for all tasks except the master's: making keys, checking a host, launching programs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from zpccl import limits
from zpccl.caller import checked_int
from zpccl.cli import doctor
from zpccl.cli.launch import Chaos, Launcher, parse_chaos
from zpccl.cli.output import add_version, discard
from zpccl.control.addresses import parse_masters
from zpccl.control.keys import checked_name, new_private_key, new_secret, public_key_of
from zpccl.errors import InvalidArgument, PCCLError


def build_parser() -> argparse.ArgumentParser:
    """The command line of zpccl."""
    parser = argparse.ArgumentParser(prog="zpccl", description="Tools for zpccl runs.")
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    keygen = commands.add_parser(
        "keygen",
        help="make a secret for a run, or a key pair for one of its parties",
        description="Without --peer: makes a secret that the master and all peers of a run share (ZPCCL_SECRET), and "
        "prints it. With --peer: makes a private key for one party, the master or a peer, writes it to a file, and "
        "prints the line with the public key for the allow list of the master (zpccl-master --allow).",
    )
    keygen.add_argument("--peer", metavar="NAME", help="make a key pair, of the party with this name")
    keygen.add_argument(
        "--out",
        metavar="FILE",
        help="write the secret or the private key to this new file, that only you can read (default: standard output "
        "for a secret, NAME.key for a private key)",
    )
    doctor.add_arguments(commands)
    launch = commands.add_parser(
        "launch",
        usage="zpccl launch [-h] [-n PROCESSES] [--master HOST:PORT] [--chaos FAULTS] -- COMMAND ...",
        help="start several processes of a program on this host",
        description="Starts a master and several processes of a program on this host, and waits until all have ended. "
        "They get ZPCCL_MASTER, and what torch.distributed needs: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Each "
        "line that they print is prefixed with the number of its process. Ctrl-C ends all. A process that fails does "
        "not end the others; the exit status is that of the first that failed.",
    )
    launch.add_argument(
        "-n", dest="count", metavar="PROCESSES", type=int, default=2, help="how many (default %(default)s)"
    )
    launch.add_argument(
        "--master",
        metavar="HOST:PORT",
        default=os.environ.get("ZPCCL_MASTER"),
        help="a master that runs already (default: ZPCCL_MASTER, else one is started)",
    )
    launch.add_argument(
        "--chaos",
        metavar="FAULTS",
        default="",
        help="kill=30s kills a random process every 30 s, but never the last; join=45s starts a new one every 45 s, "
        "without the variables of torch, until a process has ended well; 10 s later it kills the joined processes that "
        "still run, because they came too late; kill=30s,join=45s does both",
    )
    launch.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="the program and its arguments")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        status = _run(options)
        if sys.stdout is not None:  # It is None if it was closed from the start.
            sys.stdout.flush()  # Here an error can still be handled; at the program's exit it cannot.
        return status
    except KeyboardInterrupt:
        print("zpccl: interrupted", file=sys.stderr)
        return 130  # As a shell does: 128 + the number of the signal.
    except PCCLError as error:
        print(f"zpccl: {error.message}", file=sys.stderr)
        return 2
    except OSError as error:
        if sys.stdout is not None:
            discard(sys.stdout)
        if isinstance(error, BrokenPipeError):  # Nobody reads it any more.
            return 128 + signal.SIGPIPE
        print(f"zpccl: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.command == "launch":
        return _launch(options)
    return doctor.run(options) if options.command == "doctor" else _keygen(options.peer, options.out)


def _launch(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise InvalidArgument("there is no program to launch; give it after --")
    count = checked_int(options.count, "-n", 1, limits.LAUNCH_PROCESSES_MAX)
    if options.master:
        parse_masters(options.master)
    chaos = parse_chaos(options.chaos) if options.chaos else Chaos()
    return Launcher(program, count, options.master or None, chaos).run()


def _keygen(name: str | None, out: str | None) -> int:
    if sys.stdout is None and (name is not None or out is None):
        raise InvalidArgument("the standard output is closed, so nobody would learn the key")
    if name is None:
        secret = new_secret()
        if out is None:
            print(secret)
        else:
            _write_private(Path(out), secret)
        return 0
    checked_name(name)
    key, path = new_private_key(), Path(out or f"{name}.key")
    _write_private(path, key)
    try:
        print(f"{public_key_of(key)} {name}", flush=True)
    except OSError:  # Nothing prints the public key a second time, and the file would block the next try.
        path.unlink()
        raise
    return 0


def _write_private(path: Path, text: str) -> None:
    """Writes a new file that is readable by its owner only from the start; never replaces a file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
    except OSError as error:  # The disk is full. A truncated file would block the next try.
        path.unlink(missing_ok=True)
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from error
