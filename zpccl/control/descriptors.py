"""How many descriptors this process may open, and a check that they are enough: libzmq ends a process that lacks one
for its threads.
"""

from __future__ import annotations

import os
import resource
import sys

from zpccl import limits
from zpccl.errors import InternalError


def share_of_descriptors(parts: int) -> int:
    """One of `parts` equal parts of the descriptors that this process may open now."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most // parts


def check_descriptors() -> None:
    """Checks that FREE_DESCRIPTORS_COUNT more descriptors can be opened.

    Raises:
        InternalError: they cannot.
    """
    opened: list[int] = []
    try:
        while len(opened) < limits.FREE_DESCRIPTORS_COUNT:
            opened.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        what = f"{len(opened)} of {limits.FREE_DESCRIPTORS_COUNT} descriptors can be opened"
        raise InternalError(f"only {what}: {error.strerror}; raise `ulimit -n`, or close files") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)
