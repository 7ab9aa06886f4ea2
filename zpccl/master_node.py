"""A master that runs inside the user's process."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from zpccl import limits
from zpccl.caller import checked_nanoseconds
from zpccl.control.keys import master_keys
from zpccl.control.master_loop import MasterLoop
from zpccl.errors import InvalidUsage, public
from zpccl.state.workers import End, start_thread, wait_for_end

if TYPE_CHECKING:
    from zpccl.observe.metrics import MetricsServer


class MasterNode:
    """A master that runs in a thread of this process.

    The process stays alive while the master runs, unless `daemon` is True. Deleting the object waits until the master
    ends, so call `interrupt()` first, unless the master should run until the process is terminated.

    Args:
        listen_address: "host:port"; port 0 takes a free one.
        secret: text from `zpccl keygen`: the secret of the run, or the master's private key (ZPCCL_SECRET, or the file
            that ZPCCL_SECRET_FILE names). Without a secret, anybody who reaches the address may take part.
        allow: file with the public keys of the peers, if the secret is a private key.
        recovery_grace: seconds that a new master waits for peers of an earlier master, to take over their run, before
            it admits the first peer of a new run. None: the default, 1 s.
        metrics: "host:port" at which metrics are served for Prometheus, at /metrics; None: no metrics.
        straggler_timeout: seconds after which a peer is removed if all others wait for its vote; it may join again.
            Peers that wait for each other in different calls for this long get InvalidUsage and stay members.
            None: the log names these peers, and they stay.
        daemon: True: the process may end while the master runs, which ends the master, and deleting the object stops
            the master. False: deleting the object waits until the master ends.

    Raises:
        InvalidArgument: the secret or the file is malformed, the straggler timeout is not from 1 s to a day, or the
            recovery grace is more than a day.
    """

    @public
    def __init__(
        self,
        listen_address: str,
        *,
        secret: str | None = None,
        allow: str | os.PathLike[str] | None = None,
        recovery_grace: float | None = None,
        metrics: str | None = None,
        straggler_timeout: float | None = None,
        daemon: bool = False,
    ) -> None:
        if straggler_timeout is not None:
            checked_nanoseconds(straggler_timeout, "straggler_timeout", limits.STRAGGLER_TIMEOUT_MIN_NS)
        if recovery_grace is not None:
            checked_nanoseconds(recovery_grace, "recovery_grace", 0)
        self._listen_address = listen_address
        self._keys = master_keys(secret, allow_file=allow)
        self._recovery_grace = recovery_grace
        self._metrics_address = metrics
        self._metrics: MetricsServer | None = None
        self._straggler_timeout = straggler_timeout
        self._is_daemon = bool(daemon)
        self._loop: MasterLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended = End()  # Of the thread.

    @property
    def address(self) -> str:
        """The address at which the master listens, "host:port"."""
        return self._loop.address if self._loop is not None else self._listen_address

    @property
    def metrics_address(self) -> str | None:
        """The address at which metrics are served, "host:port"; None if they are not."""
        return self._metrics.address if self._metrics is not None else self._metrics_address

    @public
    def run(self) -> None:
        """Starts the master and returns.

        Raises:
            InvalidArgument: the address is malformed or does not belong to this host.
            InvalidUsage: a port is in use, this master runs already, or prometheus-client is missing.
            InternalError: the system has no thread to give, or not enough descriptors.
        """
        if self._thread is not None and self._thread.is_alive():
            raise InvalidUsage("this master runs already")
        metrics = open_metrics(self._metrics_address) if self._metrics_address is not None else None
        try:
            publish = metrics.publish if metrics is not None else None
            loop = MasterLoop(
                self._listen_address,
                keys=self._keys,
                recovery_grace=self._recovery_grace,
                publish=publish,
                straggler_timeout=self._straggler_timeout,
            )
        except BaseException:
            if metrics is not None:
                metrics.close()
            raise
        run = loop, metrics, threading.Lock(), End()
        self._loop, self._metrics, _, self._ended = run
        self._thread = threading.Thread(target=_run, args=run, name="zpccl-master", daemon=self._is_daemon)
        try:
            start_thread(self._thread)
        except BaseException:  # Ctrl-C, or no thread can be started.
            loop.stop()
            _run(*run)
            raise

    def reload(self) -> None:
        """Makes the master reload the file of allowed keys; peers whose keys it no longer lists are removed."""
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.reload()

    def interrupt(self) -> None:
        """Stops the master and waits until it has ended. Does nothing if it does not run."""
        if self._loop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.stop()
            wait_for_end(self._thread, self._ended)

    def __enter__(self) -> MasterNode:
        self.run()
        return self

    def __exit__(self, *exception: object) -> None:
        self.interrupt()

    def __reduce__(self) -> str:
        raise InvalidUsage("a master belongs to one process, and cannot be pickled or copied; make another one")

    def __del__(self) -> None:
        thread = getattr(self, "_thread", None)
        if thread is None or not thread.is_alive() or thread is threading.current_thread():
            return
        if self._is_daemon and self._loop is not None:
            self._loop.stop()  # The last chance to stop it. The thread that collects garbage must not wait for it.
        else:
            wait_for_end(thread, self._ended)


def open_metrics(listen: str) -> MetricsServer:
    """Serves metrics of a master at "host:port".

    Raises:
        InvalidArgument: the address is malformed or does not belong to this host.
        InvalidUsage: the port is in use, or prometheus-client is missing.
    """
    try:
        from zpccl.observe.metrics import MetricsServer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "prometheus_client":
            raise
        raise InvalidUsage("metrics need the package prometheus-client: pip install 'zpccl[cli]'") from error
    return MetricsServer(listen)


def _run(loop: MasterLoop, metrics: MetricsServer | None, has_begun: threading.Lock, ended: End) -> None:
    """Runs a master, or ends one whose thread could not be started. Only the first call has an effect."""
    if not has_begun.acquire(blocking=False):
        return
    try:
        loop.run()
    finally:
        if metrics is not None:
            metrics.close()
        ended.set()
