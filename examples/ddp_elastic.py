"""Trains the classifier of ddp_digits.py by DDP while peers are killed and join: one or two minutes.

    zpccl launch -n 3 --chaos kill=30s,join=30s -- python examples/ddp_elastic.py --epochs 60

Gradients are averaged over the current peers, which share a batch of about the same size whatever their number. Each
sample of an epoch is read once. A peer that joins gets weights, momentum and the position in the epoch from the others.
All peers that are left at the end have the same weights, bit for bit. Needs torch and rich: pip install
'.[torch,examples]'.
"""

import argparse
import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_digits import draw, make_model
from torch.nn.parallel import DistributedDataParallel

import zpccl
import zpccl.torch

BATCH = 96
"""Samples in one step, over all peers together."""


def again(call: Callable[[], Any]) -> Any:
    """Makes a call that all members make, and repeats it while peers are lost in it."""
    while True:
        try:
            return call()
        except zpccl.PeerLost:
            continue


def sync(comm: zpccl.Communicator, state: zpccl.SharedState) -> None:
    """Syncs with the others, unless all of them are lost meanwhile."""
    with contextlib.suppress(zpccl.TooFewPeers):
        again(lambda: comm.sync_shared_state(state))


def agreed_members(comm: zpccl.Communicator) -> tuple[str, ...]:
    """The ids of members, equal on all members: the peers that took part in a small collective."""
    try:
        return tuple(again(lambda: comm.all_gather(torch.zeros(1))).peer_ids)
    except zpccl.TooFewPeers:
        return (comm.peer_id,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=12, help="passes over the data (default %(default)s)")
    parser.add_argument("--samples", type=int, default=8000, help="digits to train on (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the model: cpu or cuda (default %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(1)  # Peers share the cores.
    images, labels = draw(options.samples, 1, options.device).tensors
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DDP needs one: this process alone.
    model = DistributedDataParallel(make_model().to(options.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parameter in model.parameters():  # SGD would make the buffer only in its first step.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    sampler = zpccl.torch.ElasticSampler(options.samples, seed=2)
    named = list(model.module.named_parameters())
    momenta = [(f"{name}.momentum", optimizer.state[parameter]["momentum_buffer"]) for name, parameter in named]
    tensors = [zpccl.TensorInfo.from_torch(tensor, name) for name, tensor in named + momenta]
    state = zpccl.SharedState(tensors + sampler.tensor_infos())

    with zpccl.Communicator() as comm:
        is_newcomer = comm.world_size > 1
        batch = torch.zeros(0, dtype=torch.long)
        hook = zpccl.torch.fault_tolerant_hook(comm, model.parameters(), samples=lambda: len(batch))
        model.register_comm_hook(None, hook)
        members: tuple[str, ...] = (comm.peer_id,)
        while sampler.epoch < options.epochs:
            if is_newcomer or again(comm.are_peers_pending):
                if not is_newcomer:
                    again(comm.update_topology)
                if comm.world_size > 1:
                    sync(comm, state)
                members, is_newcomer = agreed_members(comm), False
                continue  # A newcomer, too, must check whether the training is over.
            batch = torch.from_numpy(sampler.take(max(1, BATCH // len(members)), members, comm.peer_id))
            optimizer.zero_grad()
            if len(batch):
                torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            else:
                (0 * model(images[:1])).sum().backward()  # This peer takes part, with weight 0.
            optimizer.step()
            sampler.commit(hook.peer_ids)
            members = hook.peer_ids
            if not sampler.remaining:
                print(f"epoch {sampler.epoch} is over, {len(members)} peers", flush=True)
                sampler.next_epoch()
            state.push_revision()
    dist.destroy_process_group()

    images, labels = draw(1000, 3, options.device).tensors
    accuracy = (model.module(images).argmax(1) == labels).double().mean().item()
    weights = b"".join(parameter.numpy(force=True).tobytes() for parameter in model.parameters())
    print(f"accuracy {accuracy:.1%}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
