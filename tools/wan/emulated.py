"""A wide-area network of namespaces: each host has a TUN device, and the emulator (emulator.c) forwards between them.

Ownership: this process owns the namespaces and one end of a socket to the emulator. The emulator owns the other end and
the TUN devices, and ends when this end is closed. So nothing is left, however this process ends. Each request gets one
answer; one thread at a time uses a network.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import WorkerFailed
from networks import DEVICE, Namespaces, NetworkUnavailable

from wan.settings import Settings, queue_bytes

HOSTS_MAX = 16
CONGESTION_CONTROLS = ("bbr", "cubic", "reno")
NETWORK = "10.77"
"""The first two bytes of all addresses."""
MTU_BYTES = 1500
DEVICE_QUEUE_PACKETS = 20_000
"""Queue of a TUN device, in packets: enough for the time by which the emulator may lag."""
ANSWER_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 128 << 10
END_TIMEOUT_S = 5.0
_SOURCES = Path(__file__).resolve().parent
_PROGRAM = _SOURCES.parents[1] / "build" / "wan" / "emulator"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h, as all below
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO_ECN = 1, 2, 8
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000  # linux/sched.h, mount.h
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class PacketCounts:
    """Counters: segments, and their bytes including IP headers."""

    paths: dict[tuple[int, int], dict[str, int]]
    """By direction: in, out, lost (at random), overflown (queue full), cut, in_bytes, out_bytes, queue_bytes_max."""
    total: dict[str, int]
    """Counters of the emulator: lateness of packets (late: more than 1 ms), CPU and wall time, memory."""


class EmulatedNetwork(Namespaces):
    """A wide-area network made by the user-space emulator. Host i has the address 10.77.i.1.

    Args:
        settings: settings of the network, for 2 to HOSTS_MAX hosts.
        seed: seed of losses and jitter.
        realtime: run the emulator with realtime priority, and process on other CPUs what it delivers. If False, times
            are less exact, but no packet is lost when other CPUs are busy.

    Raises:
        NetworkUnavailable: not permitted, or no `ip` command, C compiler or TUN device.
        WorkerFailed: the emulator cannot be compiled.
    """

    def __init__(self, settings: Settings, seed: int = 0, realtime: bool = True) -> None:
        assert 2 <= settings.host_count <= HOSTS_MAX
        self.settings = settings
        self._seed, self._realtime = seed, realtime
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._earlier_drops = 0
        self._program = build_emulator()
        super().__init__(settings.host_count)

    def close(self) -> None:
        """Ends the emulator and releases the namespaces. May be called twice."""
        control, self._control = self._control, None
        process, self._process = self._process, None
        if control is not None:
            control.close()
        if process is not None:
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        super().close()

    def address(self, host: int) -> str:
        """The IPv4 address of a host."""
        assert 0 <= host < self.host_count
        return f"{NETWORK}.{host}.1"

    @property
    def emulator_pid(self) -> int:
        """The process id of the emulator."""
        assert self._process is not None
        return self._process.pid

    def configure(self, settings: Settings) -> None:
        """Applies settings atomically."""
        assert settings.host_count == self.host_count
        self._request(request_of(settings))
        self.settings = settings

    def change(self, *lines: str) -> None:
        """Changes the settings by lines (settings.py): all of them, or none if a line is wrong.

        Raises:
            SettingsError: a line is wrong.
        """
        self.configure(self.settings.with_lines(lines))

    def counts(self) -> PacketCounts:
        """Reads the counters."""
        paths: dict[tuple[int, int], dict[str, int]] = {}
        total: dict[str, int] = {}
        for line in self._request("counts\n").splitlines():
            kind, *pairs = line.split()
            values = {name: int(value) for name, _, value in (pair.partition("=") for pair in pairs)}
            if kind == "path":
                paths[values.pop("from"), values.pop("to")] = values
            elif kind == "total":
                total = values
        total["device_drops"] = self._drops() - self._earlier_drops
        return PacketCounts(paths, total)

    def reset_counts(self) -> None:
        """Resets all counters."""
        self._request("reset\n")
        self._earlier_drops = self._drops()

    def _drops(self) -> int:
        return sum(self.run(host, _device_drops) for host in range(self.host_count))

    def report(self) -> str:
        """The counters as text."""
        counts = self.counts()
        lines = [
            f"{one} -> {other}: " + " ".join(f"{name}={value}" for name, value in values.items())
            for (one, other), values in counts.paths.items()
            if values["in"]
        ]
        lines.append("emulator: " + " ".join(f"{name}={value}" for name, value in counts.total.items()))
        if counts.total["device_drops"]:
            lines.append("the kernel dropped packets before or after the emulator: figures are not the model's")
        return "\n".join(lines)

    def use_congestion_control(self, name: str) -> None:
        """Sets the congestion control of new TCP connections over the network.

        Raises:
            NetworkUnavailable: the kernel does not have it.
        """
        for host in range(self.host_count):
            try:
                self._ip(self.namespace(host), [f"route replace {self._route(host)} congctl {name}"])
            except subprocess.CalledProcessError as error:
                raise NetworkUnavailable(f"no congestion control {name!r}: {error.stderr.strip()}") from error

    # --- Setting up -------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        own = cpus[-1] if len(cpus) > 1 else -1
        devices: list[int] = []
        try:
            for host in range(self.host_count):
                devices.append(self.run(host, _open_device))
                self._set_up_host(host)
                if self._realtime:  # Otherwise the emulator's write() would run a host's TCP code.
                    self.run(host, lambda: _receive_on([cpu for cpu in cpus if cpu != own]))
            self._start(own, devices)
        finally:
            for device in devices:
                os.close(device)
        self.configure(self.settings)

    def _set_up_host(self, host: int) -> None:
        def begin() -> None:
            for name, value in (("ipv6/conf/all/disable_ipv6", "1"), ("ipv4/tcp_no_metrics_save", "1")):
                path = Path("/proc/sys/net", name)
                if path.exists():
                    path.write_text(value, encoding="ascii")

        self.run(host, begin)
        commands = [
            "link set lo up",
            f"link set {DEVICE} mtu {MTU_BYTES} txqueuelen {DEVICE_QUEUE_PACKETS} up",
            f"address add {self.address(host)}/32 dev {DEVICE}",
            f"route add {self._route(host)}",
        ]
        self._ip(self.namespace(host), commands)

    def _route(self, host: int) -> str:
        return f"{NETWORK}.0.0/16 dev {DEVICE} src {self.address(host)}"

    def _start(self, cpu: int, devices: Sequence[int]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_TIMEOUT_S)
        upper, lower = (int(part) for part in NETWORK.split("."))
        inherited = [theirs.fileno(), *devices]
        settings = [upper << 8 | lower, self._seed, cpu, int(self._realtime)]
        with theirs:
            self._process = subprocess.Popen(
                [str(self._program), *(str(value) for value in (*settings, *inherited))],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the emulator.
            )

    def _request(self, text: str) -> str:
        assert self._control is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._control.send(text.encode())
            answer = self._control.recv(ANSWER_BYTES_MAX).decode()
        if not answer.endswith("ok\n"):
            raise OSError(f"the emulator says {answer.strip()!r}" if answer else "the emulator has died")
        return answer


def request_of(settings: Settings) -> str:
    """Encodes settings for the emulator: whole nanoseconds, bits per second, bytes."""
    timing = settings.timing
    lines = [f"timing {_ns(timing.burst_us / 1e3)} {_ns(timing.coalesce_us / 1e3)} {timing.memory_bytes:.0f}"]
    for (one, other), path in settings.paths.items():
        times = f"{_ns(path.delay_ms)} {_ns(path.jitter_ms)} {_ns(path.jitter_period_ms)}"
        rate, queue = f"{path.rate_mbit * 1e6:.0f}", f"{queue_bytes(path.queue_bytes, path.rate_mbit):.0f}"
        lines.append(f"path {one} {other} {times} {rate} {path.loss!r} {path.loss_run!r} {queue} {path.cut:d}")
    for number, host in settings.hosts.items():
        egress = f"{host.egress_mbit * 1e6:.0f} {queue_bytes(host.egress_queue_bytes, host.egress_mbit):.0f}"
        ingress = f"{host.ingress_mbit * 1e6:.0f} {queue_bytes(host.ingress_queue_bytes, host.ingress_mbit):.0f}"
        lines.append(f"host {number} {egress} {ingress} {host.down:d}")
    return "\n".join(lines) + "\n"


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def build_emulator() -> Path:
    """Compiles the emulator if needed, and returns the path of the program.

    Raises:
        NetworkUnavailable: there is no C compiler, or no folder for the program.
        WorkerFailed: the compiler refuses the source.
    """
    sources = [_SOURCES / name for name in ("emulator.c", "model.c", "packet.c")]
    newest = max(path.stat().st_mtime for path in (*sources, _SOURCES / "model.h", _SOURCES / "packet.h"))
    if _PROGRAM.exists() and _PROGRAM.stat().st_mtime > newest:
        return _PROGRAM
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NetworkUnavailable("cannot compile the emulator: no C compiler")
    unfinished = _PROGRAM.with_name(f"{_PROGRAM.name}.{os.getpid()}")
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    try:
        _PROGRAM.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([compiler, *flags, "-o", unfinished, *sources, "-lm"], check=True)
        unfinished.replace(_PROGRAM)
    except subprocess.CalledProcessError as error:
        raise WorkerFailed(f"cannot compile the emulator: {compiler} exits with {error.returncode}") from error
    except OSError as error:
        raise NetworkUnavailable(f"cannot compile the emulator: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    return _PROGRAM


def _open_device() -> int:
    """Opens a TUN device in the calling thread's namespace, with TCP segmentation offload."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), flags))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN)
    except OSError:
        os.close(device)
        raise
    return device


def _receive_on(cpus: Sequence[int]) -> None:
    """Processes received packets on CPUs other than the emulator's (RPS). If this is not permitted, timing is less
    exact.

    Packets for a CPU that is busy with something else wait in its backlog, which holds net.core.netdev_max_backlog
    (1,000) packets. The rest of a larger burst is lost there (`device_drops`).
    """
    mask = sum(1 << cpu for cpu in cpus)
    words: list[str] = []
    while mask:
        words.insert(0, f"{mask & 0xFFFFFFFF:08x}")
        mask >>= 32
    with contextlib.suppress(OSError):
        _mount_own_sysfs()
        Path(f"/sys/class/net/{DEVICE}/queues/rx-0/rps_cpus").write_text(",".join(words) or "0", encoding="ascii")


def _mount_own_sysfs() -> None:
    """Makes /sys show the devices of its network namespace to the calling thread only."""
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None))


def _check(result: int) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _device_drops() -> int:
    """Number of packets that the kernel dropped on their way to the emulator or from it."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, values = line.partition(":")
        if name.strip() == DEVICE:
            counts = values.split()  # Eight counters of received packets, then eight of sent ones.
            return int(counts[3]) + int(counts[11])
    return 0
