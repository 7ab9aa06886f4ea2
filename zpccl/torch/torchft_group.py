"""zpccl in torchft: a replacement for `torchft.ProcessGroupGloo` in its Manager. Needs the package torchft."""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from zpccl.torch.process_group import ProcessGroup


class TorchftProcessGroup(ProcessGroupWrapper):
    """A process group that torchft's Manager configures anew for each quorum.

    If a rank is lost, the collective fails on all others and leaves its inputs unchanged. The Manager then discards the
    step and configures the group for the next quorum.

    Args:
        timeout: a `timedelta`, for meeting and for collectives; 60 s by default.
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        return ProcessGroup.of_all(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "torchft-zpccl"

    def set_timeout(self, timeout: Any) -> None:
        """Sets the timeout for meeting, and for collectives that are issued from now on."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """The error of the present ranks, if a collective has failed: the Manager then configures the group anew."""
        return None if self._pg is None else self._pg.failure

    def shutdown(self) -> None:
        """Leaves the run."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()
