"""All-reduces an array: start `zpccl-master`, then this script twice, or three times as `hello.py 3`, and so on."""

import sys
import time

import numpy as np

import zpccl

peers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
with zpccl.Communicator() as comm:  # Master: ZPCCL_MASTER, else 127.0.0.1:48148.
    while comm.world_size < peers:
        if comm.are_peers_pending():
            comm.update_topology()  # Called by all members; admits pending peers.
        else:
            time.sleep(0.1)
    rank, world_size = comm.rank, comm.world_size
    total = comm.all_reduce(np.full(4, rank + 1.0), op=zpccl.ReduceOp.SUM)
    print(f"rank {rank} of {world_size}: {total}")
