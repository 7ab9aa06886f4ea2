"""Trains the classifier of ddp_digits.py on several hosts: FSDP2 over Gloo inside each, zpccl between them. One minute.

    zpccl-master
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # Else Gloo may find addresses of processes that have died.
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2_hosts.py --host one
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/fsdp2_hosts.py --host two --die-after 100

Start each host in its own terminal; ZPCCL_MASTER says where the master is. The processes of a host hold the model
together: each has its shard of every parameter. The processes with the same shard, one on each host, form a peer group:
they average its gradients and share its state. A host is admitted when all its processes are there. When one of them
dies, the master removes the others too, so that no other host waits for them; torchrun starts them again, and they get
the state from the other hosts. All hosts end with the same weights, bit for bit. Needs torch and rich: pip install
'.[torch,examples]'.
"""

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ddp_digits import draw, make_model
from rich.progress import Progress
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zpccl


def again(call: Callable[[], Any]) -> Any:
    """Makes a call that all members make, and repeats it while peers are lost in it; None if no other peer is left."""
    while True:
        try:
            return call()
        except zpccl.PeerLost:
            continue
        except zpccl.TooFewPeers:
            return None


def average(comm: zpccl.Communicator, gradients: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The mean of the shards of all hosts, and the number of hosts, which is equal on all processes of this host."""
    mean = torch.empty_like(gradients)
    while True:
        info = again(lambda: comm.all_reduce(gradients, mean, op=zpccl.ReduceOp.AVG))
        hosts = torch.tensor([info.local_world_size if info else 1])
        fewest, most = hosts.clone(), hosts.clone()
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if fewest == most:
            return (mean if info else gradients), int(hosts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", help="what this host is called (default: its hostname)")
    parser.add_argument("--steps", type=int, default=1500, help="of training (default %(default)s)")
    parser.add_argument("--hosts", type=int, default=1, help="wait while there are fewer (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="of the model: cpu or cuda (default %(default)s)")
    parser.add_argument("--die-after", type=int, metavar="STEPS", help="kill the last process of this host then, once")
    options = parser.parse_args()

    torch.set_num_threads(1)  # Processes share the cores.
    dist.init_process_group("cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo")  # The processes of this host.
    rank, size = dist.get_rank(), dist.get_world_size()
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = make_model().to(options.device)
    fully_shard(model, mesh=init_device_mesh(options.device, (size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for parameter in model.parameters():  # SGD would make the buffer only in its first step.
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    step = torch.zeros(1, dtype=torch.int64)
    shards = {"step": step}
    for name, parameter in model.named_parameters():
        shards[name] = parameter.data.to_local()
        shards[f"{name}.momentum"] = optimizer.state[parameter]["momentum_buffer"].to_local()
    tensors = [zpccl.TensorInfo.from_torch(shard, name) for name, shard in shards.items() if shard.numel()]
    state = zpccl.SharedState(tensors)

    comm = zpccl.Communicator(peer_group=rank, host=options.host, host_size=size)
    comm.connect()
    is_newcomer = comm.world_size > 1
    hosts, taken = options.hosts, 0
    seed = int(comm.peer_id[:8], 16)  # Each process has samples of its own.
    images, labels = draw(2000, seed, options.device).tensors
    bar = Progress(transient=True, disable=rank != 0 or not sys.stdout.isatty())
    shown = bar.add_task("steps", total=options.steps)
    bar.start()
    while step < options.steps:
        if is_newcomer or again(comm.are_peers_pending):
            if not is_newcomer:
                again(comm.update_topology)
            again(lambda: comm.sync_shared_state(state))
            is_newcomer, hosts = False, options.hosts
            continue  # A newcomer, too, must check whether the training is over.
        if hosts < options.hosts:
            time.sleep(0.1)
            continue
        if taken == options.die_after and rank == size - 1 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        batch = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        mean, hosts = average(comm, torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, mean.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        optimizer.step()
        step += 1
        taken += 1
        state.push_revision()
        bar.update(shown, completed=step.item())
        if rank == 0 and step % 100 == 0:
            print(f"step {step.item()}, loss {loss.item():.3f}, {hosts} hosts", flush=True)
    bar.stop()

    weights = b"".join(parameter.full_tensor().numpy(force=True).tobytes() for parameter in model.parameters())
    if rank == 0:
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    dist.barrier()  # A process that leaves takes its host along, so all processes finish first.
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
