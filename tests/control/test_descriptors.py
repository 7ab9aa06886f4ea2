"""A process that may open few files gets an error: libzmq would end it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zpccl import limits

PROGRAM = """
import os, resource, sys, warnings
import zpccl
warnings.simplefilter("ignore")
limit, free = 200, int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
used = [os.dup(0) for _ in range(limit - len(os.listdir("/proc/self/fd")) + 1)]
for _ in range(free):
    os.close(used.pop())
try:
    if sys.argv[1] == "peer":
        zpccl.Communicator("127.0.0.1:1").connect(1)
    else:
        zpccl.MasterNode("127.0.0.1:0", daemon=True).run()
except zpccl.PCCLError as error:
    print(type(error).__name__, error.message)
print(len(os.listdir("/proc/self/fd")) - 1 - len(used))
"""


@pytest.mark.parametrize("what", ["peer", "master"])
@pytest.mark.parametrize("free", [8, limits.FREE_DESCRIPTORS_COUNT - 1])
def test_a_process_without_descriptors_gets_an_error(what: str, free: int) -> None:
    """At 8, libzmq has its first socket, and none for its threads."""
    command = [sys.executable, "-c", PROGRAM, what, str(free)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    error, descriptors = done.stdout.splitlines()
    assert error.startswith(f"InternalError only {free} of {limits.FREE_DESCRIPTORS_COUNT} descriptors can be opened: ")
    assert int(descriptors) < 10, "all are closed again"


def test_enough_descriptors_are_enough() -> None:
    command = [sys.executable, "-c", PROGRAM, "peer", str(limits.FREE_DESCRIPTORS_COUNT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("MasterUnreachable "), done.stderr
    command[3] = "master"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) == 1, "the master runs"
