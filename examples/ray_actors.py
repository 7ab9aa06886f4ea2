"""Peers as actors of Ray: when an actor dies, Ray starts it again, and it joins the others at their current step.

    pip install ray
    python examples/ray_actors.py --kill     # on this machine, with one actor killed in between: half a minute

On a cluster (RAY_ADDRESS), Ray spreads the actors over its nodes. Set ZPCCL_SECRET there to the output of
`zpccl keygen`: without a secret, the master listens on the loopback interface only. The master is in the driver, and
ends with it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import numpy as np
import ray

import zpccl

FEATURES = 1000


class Peer:
    """Learns the weights of a line from its own samples; gradients are averaged over the current actors."""

    def train(self, master: str, secret: str | None, steps: int, peers: int) -> tuple[int, str]:
        """Trains until the run has taken `steps` steps. Ray calls this again in an actor that it has restarted.

        Returns:
            The number of steps that this process has taken itself, and a digest of the weights.
        """
        random = np.random.default_rng()
        truth = np.linspace(-1, 1, FEATURES)
        weights = np.zeros(FEATURES)
        state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(weights, "weights")])
        taken = 0
        with zpccl.Communicator(master, secret=secret) as comm:
            while state.revision < steps:
                if comm.are_peers_pending():
                    comm.update_topology()
                    continue
                if comm.world_size < 2:
                    time.sleep(0.1)
                    continue
                try:
                    comm.sync_shared_state(state)
                    # Revision and sum are equal on all peers, so all take the same branch. world_size may differ.
                    if state.revision == 0 and comm.all_reduce(np.ones(1), op=zpccl.ReduceOp.SUM)[0] < peers:
                        time.sleep(0.1)
                        continue
                    samples = random.standard_normal((32, FEATURES))
                    gradient = samples.T @ (samples @ (weights - truth)) / len(samples)
                    gradient = comm.all_reduce(gradient, op=zpccl.ReduceOp.AVG)
                except (zpccl.PeerLost, zpccl.TooFewPeers):
                    continue
                weights -= 0.01 * gradient
                state.push_revision()
                taken += 1
                time.sleep(0.02)  # A step of a real model takes longer.
        return taken, hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=3, help="actors (default 3)")
    parser.add_argument("--steps", type=int, default=300, help="steps of the training (default 300)")
    parser.add_argument("--kill", action="store_true", help="kill an actor after a few seconds")
    options = parser.parse_args()

    ray.init()
    secret = os.environ.get("ZPCCL_SECRET")
    host = ray.util.get_node_ip_address() if secret else "127.0.0.1"
    with zpccl.MasterNode(f"{host}:0", secret=secret) as master:
        remote: Any = ray.remote(max_restarts=-1, max_task_retries=-1)(Peer)
        actors = [remote.remote() for _ in range(options.peers)]
        results = [actor.train.remote(master.address, secret, options.steps, options.peers) for actor in actors]
        if options.kill:
            ray.wait(results, timeout=8)
            print("killing an actor", flush=True)
            ray.kill(actors[0], no_restart=False)
        ray.wait(results)  # All connected actors end together.
        ended, lost = ray.wait(results, num_returns=len(results), timeout=10)
        for taken, digest in ray.get(ended):
            print(f"{taken} steps of {options.steps}, weights {digest}")
        if lost:  # They wait for other actors, which have ended.
            print(f"{len(lost)} of {options.peers} actors were away when the training ended")
    ray.shutdown()


if __name__ == "__main__":
    main()
