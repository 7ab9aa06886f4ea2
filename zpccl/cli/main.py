"""zpccl: the command for tasks besides the master: making keys, checking a host."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from zpccl.cli import doctor
from zpccl.control.keys import checked_name, new_private_key, new_secret, public_key_of
from zpccl.errors import InvalidArgument, PCCLError


def build_parser() -> argparse.ArgumentParser:
    """The command line of zpccl."""
    parser = argparse.ArgumentParser(prog="zpccl", description="Tools for zpccl runs.")
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
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = build_parser().parse_args(arguments)
    try:
        return doctor.run(options) if options.command == "doctor" else _keygen(options.peer, options.out)
    except KeyboardInterrupt:
        print("zpccl: interrupted", file=sys.stderr)
        return 130  # As of a shell: 128 and the number of the signal.
    except PCCLError as error:
        print(f"zpccl: {error.message}", file=sys.stderr)
        return 2


def _keygen(name: str | None, out: str | None) -> int:
    if name is None:
        secret = new_secret()
        if out is None:
            print(secret)
        else:
            _write_private(Path(out), secret)
        return 0
    checked_name(name)
    key = new_private_key()
    _write_private(Path(out or f"{name}.key"), key)
    print(f"{public_key_of(key)} {name}")
    return 0


def _write_private(path: Path, text: str) -> None:
    """Writes a new file that is readable by its owner only from the start; never replaces a file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
