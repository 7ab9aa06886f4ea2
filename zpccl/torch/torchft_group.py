"""zpccl in torchft: what its Manager takes in place of `torchft.ProcessGroupGloo`. Needs the package torchft."""

from __future__ import annotations

from typing import Any

from torchft.process_group import ProcessGroupWrapper

from zpccl.torch.process_group import ProcessGroup


class TorchftProcessGroup(ProcessGroupWrapper):
    """A process group that torchft's Manager configures anew for each quorum.

    A collective among ranks one of which is lost fails on all of them, with its inputs as they were; the Manager then
    discards the step, and configures the group for the next quorum.

    Args:
        timeout: a `timedelta`, of meeting and of collectives; 60 s by default.
    """

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        return ProcessGroup.of_all(store, rank, world_size, self._timeout)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "torchft-zpccl"

    def set_timeout(self, timeout: Any) -> None:
        """Sets the timeout of what is issued from now on, and of meeting."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def errored(self) -> Exception | None:
        """Why the ranks of now are over, if a collective has failed: the Manager then configures the group anew."""
        return None if self._pg is None else self._pg.failure

    def shutdown(self) -> None:
        """Leaves the run."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()
