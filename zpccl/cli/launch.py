"""zpccl launch: starts several processes of a program on this host, and a master for them.

One thread waits for everything: output of the processes, their ends, signals, and the next kill or join. Each process
has a session of its own, so a Ctrl-C of the terminal reaches only the launcher, which passes it on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from zpccl import limits
from zpccl.cli.output import discard
from zpccl.errors import InvalidArgument
from zpccl.master_node import MasterNode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Chaos:
    """Faults on purpose.

    Attributes:
        kill_s: seconds between two kills of a random process; None: no kills. The last process is left alone.
        join_s: seconds between two starts of a new process; None: no starts.
    """

    kill_s: float | None = None
    join_s: float | None = None


def parse_chaos(text: str) -> Chaos:
    """Parses "kill=30s,join=45s". Either part may be left out, and the unit (s or m), which is then seconds.

    Raises:
        InvalidArgument: the text is not of this form, or a time is longer than a day.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(kill|join)=(\d+(?:\.\d+)?)([sm]?)\s*", part)
        seconds = float(match[2]) * (60 if match[3] == "m" else 1) if match else 0.0
        if match is None or seconds <= 0 or match[1] in found:
            raise InvalidArgument(f"chaos {text!r} is not like 'kill=30s,join=45s'")
        if seconds > limits.GIVEN_TIME_MAX_NS / limits.SECOND:
            raise InvalidArgument(f"chaos {text!r} has a time of more than a day")
        found[match[1]] = seconds
    return Chaos(found.get("kill"), found.get("join"))


@dataclass(eq=False)
class _Child:
    number: int
    process: subprocess.Popen[bytes]
    exit_descriptor: int
    has_joined: bool = False
    line: bytearray = field(default_factory=bytearray)
    is_killed: bool = False


class Launcher:
    """Runs processes until all have ended.

    Args:
        command: the program and its arguments.
        count: number of processes to start.
        master: address of a master that runs already; None: one is started, on this host.
        chaos: faults on purpose.
        output: gets the lines of all processes, each prefixed with the number of its process.
    """

    def __init__(
        self, command: Sequence[str], count: int, master: str | None, chaos: Chaos, output: BinaryIO | None = None
    ) -> None:
        self._command, self._count, self._chaos = list(command), count, chaos
        self._master_address = master
        # There is no sys.stdout if it was closed from the start.
        self._output = output or (sys.stdout.buffer if sys.stdout is not None else open(os.devnull, "wb"))  # noqa: SIM115
        self._selector = selectors.DefaultSelector()
        self._children: list[_Child] = []
        self._started = 0
        self._status = 0
        self._is_over = self._is_stopping = False
        self._kill_at_s: float | None = None
        self._late_at_s: float | None = None  # When to kill processes that joined and still run.
        self._timers: dict[Callable[[], None], tuple[float, float]] = {}
        self._environment = dict(os.environ)
        self._signals: list[int] = []

    def run(self) -> int:
        """Runs until all processes have ended.

        Returns:
            The exit status of the first process that failed, or 128 + the number of the signal that ended it; 130 if
            Ctrl-C came before, 143 if SIGTERM did, 129 if the terminal was closed, 141 if nobody reads the output;
            otherwise 0.

        Raises:
            InvalidArgument: the program cannot be started.
            PCCLError: the master cannot be started.
        """
        master = None
        if self._master_address is None:
            # As a daemon it ends with this process, also if Ctrl-C comes before its end is provided for below.
            master = MasterNode("127.0.0.1:0", recovery_grace=0, daemon=True)
            master.run()
            self._master_address = master.address
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # Under nohup SIGHUP is ignored, and stays so.
        numbers = [each for each in STOP_SIGNALS if (each, signal.getsignal(each)) != (signal.SIGHUP, signal.SIG_IGN)]
        before = [(number, signal.signal(number, self._on_signal)) for number in numbers]
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            self._selector.register(reader, selectors.EVENT_READ, lambda: reader.recv(64))
            self._prepare()
            self._loop()
            return self._status
        finally:
            self._kill_all()  # After an error. Otherwise all have ended.
            for child in list(self._children):
                with contextlib.suppress(OSError):  # The error may have been that the output cannot be written.
                    self._on_exit(child)
            signal.set_wakeup_fd(descriptor)
            for number, handler in before:
                signal.signal(number, handler)
            reader.close()
            writer.close()
            self._selector.close()
            if master is not None:
                master.interrupt()

    def _prepare(self) -> None:
        threads = max((os.cpu_count() or 1) // self._count, 1)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._environment.update(ZPCCL_MASTER=self._master_address or "", PYTHONUNBUFFERED="1")
        self._environment.setdefault("OMP_NUM_THREADS", str(threads))
        for rank in range(self._count):
            self._start(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(self._count),
                LOCAL_WORLD_SIZE=str(self._count),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
        now_s = time.monotonic()
        for interval_s, action in ((self._chaos.kill_s, self._kill_one), (self._chaos.join_s, self._join_one)):
            if interval_s is not None:
                self._timers[action] = now_s + interval_s, interval_s

    def _start(self, *, has_joined: bool = False, **variables: str) -> None:
        number = self._started
        name = self._environment.get("ZPCCL_NAME") or "peer"
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**self._environment, **variables, "ZPCCL_NAME": f"{name}{number}"},
                start_new_session=True,
            )
        except OSError as error:
            program = self._command[0]
            hint = f"; to run it with Python: -- python {program}" if program.endswith(".py") else ""
            raise InvalidArgument(f"cannot start {program}: {error.strerror}{hint}") from error
        self._started += 1
        child = _Child(number, process, os.pidfd_open(process.pid), has_joined)
        self._children.append(child)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, lambda: self._read(child))
        self._selector.register(child.exit_descriptor, selectors.EVENT_READ, lambda: self._on_exit(child))

    # --- Events -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._children:
            for key, _ in self._selector.select(self._seconds_left()):
                key.data()
            self._take_signals()
            now_s = time.monotonic()
            if self._kill_at_s is not None and now_s >= self._kill_at_s:
                self._kill_all()
                self._kill_at_s = None
            if self._late_at_s is not None and now_s >= self._late_at_s:
                self._end_late()
            for action, (at_s, interval_s) in list(self._timers.items()):
                if now_s >= at_s and not self._is_over:
                    self._timers[action] = now_s + interval_s, interval_s  # If it is late, nothing is made up for.
                    action()

    def _seconds_left(self) -> float | None:
        times = [at_s for at_s, _ in self._timers.values()] if not self._is_over else []
        times += [at_s for at_s in (self._kill_at_s, self._late_at_s) if at_s is not None]
        return max(min(times) - time.monotonic(), 0) if times else None

    def _on_signal(self, number: int, frame: object) -> None:
        del frame
        self._signals.append(number)

    def _take_signals(self) -> None:
        while self._signals:
            self._stop(self._signals.pop(0))

    def _stop(self, number: int) -> None:
        """Ends all processes: passes the first signal on, and kills at a second one. Many programs ignore SIGPIPE, so
        they get SIGTERM for it.

        The end of the terminal (SIGHUP) and of the reader (SIGPIPE) do not count as a second signal: both come together
        with a Ctrl-C that also reaches the reader, and the kernel and the shell each send a SIGHUP.
        """
        self._status = self._status or 128 + number
        if self._is_stopping:
            if number not in (signal.SIGHUP, signal.SIGPIPE):
                self._kill_all()
            return
        self._is_stopping = self._is_over = True
        self._kill_at_s = time.monotonic() + limits.LAUNCH_STOP_TIMEOUT_NS / limits.SECOND
        for child in self._children:
            _signal_group(child, signal.SIGTERM if number == signal.SIGPIPE else number)

    def _kill_all(self) -> None:
        for child in self._children:
            _signal_group(child, signal.SIGKILL)

    def _read(self, child: _Child) -> int:
        """Writes the complete lines of a process. Returns the number of bytes read; 0: there is nothing to read now."""
        assert child.process.stdout is not None
        if child.process.stdout.closed:  # The process has just ended, and all of its output has been read.
            return 0
        try:
            data = os.read(child.process.stdout.fileno(), limits.LAUNCH_LINE_BYTES_MAX)
        except BlockingIOError:
            return 0
        if not data:
            if child.process.stdout in self._selector.get_map():
                self._selector.unregister(child.process.stdout)
            return 0
        *lines, rest = (bytes(child.line) + data).split(b"\n")
        child.line[:] = rest
        for line in lines:
            self._write(child, line)
        if len(child.line) >= limits.LAUNCH_LINE_BYTES_MAX:
            self._write(child, bytes(child.line))
            child.line.clear()
        return len(data)

    def _write(self, child: _Child, line: bytes) -> None:
        data = b"[%d] %s\n" % (child.number, line)
        try:
            while data:
                self._wait_for_reader()
                data = data[os.write(self._output.fileno(), data[: select.PIPE_BUF]) :]
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # The pipe, or the terminal, has been closed.
                raise
            discard(self._output)
            self._signals.append(signal.SIGPIPE)

    def _wait_for_reader(self) -> None:
        """Waits until the output takes PIPE_BUF bytes. If a signal ends all meanwhile, the rest of it is discarded."""
        while not select.select([], [self._output], [], limits.SIGNAL_CHECK_INTERVAL_NS / limits.SECOND)[1]:
            self._take_signals()
            if self._is_stopping:
                discard(self._output)

    def _on_exit(self, child: _Child) -> None:
        status = child.process.wait()
        left = _unread_bytes(child)  # Its own children may write more; that is not waited for.
        while left > 0 and (count := self._read(child)):
            left -= count
        if child.line:
            self._write(child, bytes(child.line))
        assert child.process.stdout is not None
        if child.process.stdout in self._selector.get_map():
            self._selector.unregister(child.process.stdout)
        child.process.stdout.close()
        self._selector.unregister(child.exit_descriptor)
        os.close(child.exit_descriptor)
        self._children.remove(child)
        if child.is_killed or self._is_stopping:
            return
        if status == 0:
            if not self._is_over:  # The training is done: a process that joins now would begin another.
                self._is_over = True
                self._late_at_s = time.monotonic() + limits.LAUNCH_STOP_TIMEOUT_NS / limits.SECOND
            return
        status = status if status > 0 else 128 - status
        self._write(child, b"zpccl launch: ended with status %d" % status)
        self._status = self._status or status

    # --- Chaos ------------------------------------------------------------------------------------------------------

    def _kill_one(self) -> None:
        alive = [child for child in self._children if not child.is_killed]
        if len(alive) > 1:
            child = random.choice(alive)
            self._kill(child, b"killed on purpose")

    def _kill(self, child: _Child, why: bytes) -> None:
        child.is_killed = True
        self._write(child, b"zpccl launch: %s" % why)
        _signal_group(child, signal.SIGKILL)

    def _join_one(self) -> None:
        if len(self._children) < limits.LAUNCH_PROCESSES_MAX:
            self._start(has_joined=True)
            self._write(self._children[-1], b"zpccl launch: joins")

    def _end_late(self) -> None:
        """Kills processes that joined when the others were done: they wait for others, or train again, alone."""
        self._late_at_s = None
        for child in self._children:
            if child.has_joined and not child.is_killed:
                self._kill(child, b"killed, as it came too late")


def _unread_bytes(child: _Child) -> int:
    assert child.process.stdout is not None
    if child.process.stdout.closed:
        return 0
    found = fcntl.ioctl(child.process.stdout, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def _signal_group(child: _Child, number: int) -> None:
    """Sends a signal to a process and its own children, unless it has ended."""
    if child.process.returncode is None:
        try:
            os.killpg(child.process.pid, number)
        except ProcessLookupError:
            pass
