"""Tests an installation: two communicators in one process all-reduce. Run it with `python tools/smoke.py`."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

import zpccl

ELEMENTS = 100_003
WAIT_S = 30


def reduce_once(address: str, peer: int, results: dict[int, NDArray[np.float32]]) -> None:
    """Joins the run at `address`, waits for a second peer, and all-reduces an array filled with `peer` + 1."""
    with zpccl.Communicator(address) as comm:
        while comm.world_size < 2:
            if comm.are_peers_pending():
                comm.update_topology()
        values = np.full(ELEMENTS, peer + 1, dtype=np.float32)
        results[peer] = np.zeros_like(values)
        comm.all_reduce(values, results[peer], op=zpccl.ReduceOp.SUM)


def main() -> None:
    master = zpccl.MasterNode("127.0.0.1:0", recovery_grace=0.1)
    master.run()
    results: dict[int, NDArray[np.float32]] = {}
    threads = [
        threading.Thread(target=reduce_once, args=(master.address, peer, results), daemon=True) for peer in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    master.interrupt()
    expected = np.full(ELEMENTS, 3, dtype=np.float32)
    if len(results) != 2 or not all(np.array_equal(result, expected) for result in results.values()):
        raise SystemExit(f"{zpccl.__file__}: wrong results: {results}")
    print(f"{zpccl.__file__}: two peers agree on a sum of {ELEMENTS} elements")


if __name__ == "__main__":
    main()
