"""zpccl-master: the daemon that coordinates a run."""

from __future__ import annotations

import argparse
import os
import resource
import signal
import sys

from zpccl import limits
from zpccl.cli.output import add_version, discard
from zpccl.control.addresses import is_loopback, parse_address
from zpccl.control.keys import master_keys
from zpccl.control.master_loop import MasterLoop, logger
from zpccl.errors import PCCLError
from zpccl.master_node import open_metrics
from zpccl.observe.logs import LEVELS, log_to_stderr

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that stop the master."""


def build_parser() -> argparse.ArgumentParser:
    """The command line of zpccl-master."""
    parser = argparse.ArgumentParser(
        prog="zpccl-master",
        description="Coordinates a zpccl run: admits peers, starts collectives and decides their outcome. It holds no "
        "tensors and needs little memory and CPU. Stop it with Ctrl-C or SIGTERM; SIGUSR2 makes it log what it has "
        "measured of the network.",
    )
    add_version(parser)
    parser.add_argument(
        "--bind",
        metavar="HOST:PORT",
        default=f"0.0.0.0:{limits.MASTER_PORT}",
        help="where to listen (default %(default)s; port 0 takes a free one)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        metavar="SECONDS",
        type=float,
        default=limits.HEARTBEAT_TIMEOUT_NS / limits.SECOND,
        help="a silent host is lost after this time (default %(default)s)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret of the run, or with the master's private key (`zpccl keygen` makes both; else "
        "ZPCCL_SECRET, or the file that ZPCCL_SECRET_FILE names)",
    )
    parser.add_argument(
        "--allow",
        metavar="FILE",
        help="if the master has a private key: file with the public keys of the peers, one line each, `zpp_... NAME`; "
        "SIGHUP reloads it and removes peers that are no longer listed",
    )
    parser.add_argument(
        "--recovery-grace",
        metavar="SECONDS",
        type=float,
        default=limits.RECOVERY_GRACE_NS / limits.SECOND,
        help="after a restart, wait this long for the peers of the run to report, and before a new run begins "
        "(default %(default)s)",
    )
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics for Prometheus at http://HOST:PORT/metrics (needs the extra `cli`; anybody who reaches "
        "the port can read them)",
    )
    parser.add_argument(
        "--straggler-timeout",
        metavar="SECONDS",
        type=float,
        help="remove a peer if others have waited this long for its vote, for example because its training program "
        "hangs; it may join again; peers that wait for each other this long get an error (default: never; they are "
        "named in the log)",
    )
    parser.add_argument(
        "--log-level",
        choices=LEVELS,
        default=os.environ.get("ZPCCL_LOG_LEVEL", "").lower() or "info",
        help="lowest level to log to standard error (default %(default)s, or ZPCCL_LOG_LEVEL)",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the daemon; returns its exit status."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    heartbeat_min, heartbeat_max = (
        bound // limits.SECOND for bound in (limits.HEARTBEAT_TIMEOUT_MIN_NS, limits.HEARTBEAT_TIMEOUT_MAX_NS)
    )
    if not heartbeat_min <= options.heartbeat_timeout <= heartbeat_max:
        parser.error(f"--heartbeat-timeout must be between {heartbeat_min} and {heartbeat_max} seconds")
    longest = limits.GIVEN_TIME_MAX_NS // limits.SECOND
    if not 0 <= options.recovery_grace <= longest:
        parser.error(f"--recovery-grace must be between 0 and {longest} seconds")
    straggler_min = limits.STRAGGLER_TIMEOUT_MIN_NS // limits.SECOND
    if options.straggler_timeout is not None and not straggler_min <= options.straggler_timeout <= longest:
        parser.error(f"--straggler-timeout must be between {straggler_min} and {longest} seconds")
    if options.log_level not in LEVELS:  # argparse does not check defaults.
        parser.error(f"ZPCCL_LOG_LEVEL must be one of {', '.join(LEVELS)}, not {options.log_level!r}")
    log_to_stderr(options.log_level)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # One per connection, strangers included.
    metrics = None
    try:
        keys = master_keys(secret_file=options.secret_file, allow_file=options.allow)
        metrics = open_metrics(options.metrics) if options.metrics is not None else None
        loop = MasterLoop(
            options.bind,
            heartbeat_timeout_ns=int(options.heartbeat_timeout * limits.SECOND),
            keys=keys,
            recovery_grace=options.recovery_grace,
            publish=metrics.publish if metrics is not None else None,
            straggler_timeout=options.straggler_timeout,
        )
    except PCCLError as error:
        if metrics is not None:
            metrics.close()
        print(f"zpccl-master: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # While it reads the secret from a pipe, or looks up a name.
        print("zpccl-master: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT

    def end(*_: object) -> None:
        signal.set_wakeup_fd(-1)  # The loop is awake, and is about to close the descriptor.
        loop.stop()

    for number in ENDING:
        signal.signal(number, end)
    if options.allow is not None:
        signal.signal(signal.SIGHUP, lambda *_: loop.reload())
    signal.signal(signal.SIGUSR2, lambda *_: loop.log_topology())
    # Python runs handlers between its instructions: without this, a signal just before the loop sleeps would not wake
    # it.
    signal.set_wakeup_fd(loop.wakeup_descriptor, warn_on_full_buffer=False)
    _say(f"zpccl-master listens on {loop.address}")
    if metrics is not None:
        logger.info("metrics are at http://%s/metrics", metrics.address)
    if keys is not None and keys.allow_file is not None:
        logger.info("%d keys are allowed; the public key of this master is %s", len(keys.allowed), keys.public_text)
    elif keys is not None:
        logger.info("only holders of the secret can take part")
    elif not is_loopback(parse_address(loop.address)[0]):
        logger.warning("there is no secret: anybody who reaches %s can take part in the run", loop.address)
    try:
        loop.run()
    finally:
        # During Python's exit a further signal would kill the process. Not sooner: Python prints a traceback if a
        # signal comes at the very moment when its handler is replaced.
        for number in (*ENDING, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        if metrics is not None:
            metrics.close()
    logger.info("stopped")
    return 0


def _say(text: str) -> None:
    """Prints a line. If that fails, for example on a full disk, the master goes on without its output."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("cannot write to the standard output: %s", error.strerror)
        discard(sys.stdout)


if __name__ == "__main__":
    sys.exit(main())
