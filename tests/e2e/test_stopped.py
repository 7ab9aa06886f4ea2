"""Peers that are stopped (SIGSTOP) briefly, as on a host that sleeps or swaps. test_membership.py has longer stops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.harness import Child, cluster, until
from e2e.training import end, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def sockets_of(child: Child) -> set[str]:
    """The inodes of its sockets."""
    names = [os.readlink(entry) for entry in Path(f"/proc/{child.pid}/fd").iterdir()]
    return {name.removeprefix("socket:[").removesuffix("]") for name in names if name.startswith("socket:[")}


def unread_bytes(child: Child, sockets: set[str], port: int) -> int:
    """Bytes that the kernel holds unread on the child's connections to a port."""
    total = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{child.pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            _, _, remote, _, queues, _, _, _, _, inode = line.split()[:10]
            if inode in sockets and int(remote.rpartition(":")[2], 16) == port:
                total += int(queues.partition(":")[2], 16)
    return total


@pytest.mark.parametrize("local", [False, True])
def test_stopped_for_less_than_the_heartbeat_timeout(local: bool) -> None:
    """L1: the others wait, for some heartbeats without an answer; nothing else happens."""
    with cluster() as run:
        children = run.members(4, local_sockets=local)
        for child in children:
            child.start(train)
        assert [child.note() for child in children] == [4] * 4
        port = int(run.master.address.rpartition(":")[2])
        children[3].freeze()
        sockets = sockets_of(children[3])
        for _ in range(5):  # Two or three messages may have been in flight; the others are heartbeats.
            before = unread_bytes(children[3], sockets, port)
            until(lambda before=before: unread_bytes(children[3], sockets, port) > before, "a heartbeat")  # type: ignore[misc]
        assert not any(child.is_done() for child in children)
        children[3].thaw()
        for result in end(children):
            assert result["failures"] == []
            assert result["view"][1] == 4
        assert "lost" not in run.master.log.read_text()
