"""Training on a real GPU, which several processes share. Skipped on machines without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.local import local_run

import zpccl
from pytorch.programs import Processes

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.e2e,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

TRAIN = """
import sys, torch, torch.distributed as dist, zpccl, zpccl.torch
backend, file = sys.argv[1:]
torch.use_deterministic_algorithms(True)
dist.init_process_group(backend)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(1 + dist.get_rank())
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(64, 512, device="cuda")).square().mean().backward()
    optimizer.step()
torch.save({name: tensor.cpu() for name, tensor in model.module.state_dict().items()}, f"{file}.{dist.get_rank()}")
dist.barrier()
print("trained", flush=True)
dist.destroy_process_group()
"""


def test_two_ranks_train_as_on_gloo_bit_for_bit(tmp_path: Path) -> None:
    """A sum of two does not depend on their order. There are several buckets, which are reduced side by side."""
    weights = []
    for backend in ("zpccl", "gloo"):
        with Processes(TRAIN, 2, backend, str(tmp_path / backend), CUBLAS_WORKSPACE_CONFIG=":4096:8") as processes:
            assert [processes.line(rank) for rank in range(2)] == ["trained"] * 2
            weights += [torch.load(f"{tmp_path / backend}.{rank}") for rank in range(2)]
    expected = weights.pop()
    for found in weights:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


BROKEN = """
import torch, torch.distributed as dist, zpccl, zpccl.torch
dist.init_process_group("zpccl")
tensor = torch.ones(1000, device="cuda")
dist.all_reduce(tensor)
if dist.get_rank() == 0:
    tensor[torch.full((1,), 10**6, device="cuda")] = 1  # The kernel fails, and with it all later work of the process.
try:
    dist.all_reduce(tensor)
except zpccl.PCCLError as error:
    print(type(error).__name__, "CUDA" in str(error), flush=True)
dist.destroy_process_group()
"""


def test_a_gpu_that_fails_one_rank_ends_the_group() -> None:
    """L1: the rank gets torch's error as one of the group, and no other rank waits for it."""
    with Processes(BROKEN, 2) as processes:
        assert processes.line(0) == "InternalError True"
        assert processes.line(1) in ("PeerLost False", "MasterUnreachable False")


HOOK = """
import sys, torch, torch.distributed as dist, zpccl
from zpccl.torch.hook import fault_tolerant_hook
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model = torch.nn.Linear(100, 100).cuda()
comm = zpccl.Communicator(sys.argv[1])
comm.connect()
while comm.world_size < 3:
    comm.update_topology()
ddp = torch.nn.parallel.DistributedDataParallel(model)
hook = fault_tolerant_hook(comm, ddp.parameters())
ddp.register_comm_hook(None, hook)
step = 0
while step < 30 or len(hook.peer_ids) > 2:
    ddp.zero_grad()
    ddp(torch.full((2, 100), float(step), device="cuda")).sum().backward()
    torch.testing.assert_close(ddp.module.weight.grad, torch.full_like(model.weight, 2.0 * step))
    step += 1
    if step == 10:
        print("trains", flush=True)
print(len(hook.peer_ids), step, flush=True)
comm.close()
"""


def test_ddp_goes_on_without_a_lost_peer() -> None:
    with zpccl.MasterNode("127.0.0.1:0") as master, Processes(HOOK, 3, master.address) as processes:
        assert [processes.line(rank) for rank in range(3)] == ["trains"] * 3
        processes.ranks[1].kill()
        ends = [processes.line(rank).split() for rank in (0, 2)]
        assert ends[0] == ends[1] and ends[0][0] == "2", ends


def test_a_joiner_gets_the_state_of_a_gpu() -> None:
    """S2: of three members one has other contents. All tensors are equal after the sync, on GPU and CPU."""
    with local_run(3) as run:

        def sync(comm: zpccl.Communicator) -> list[Any]:
            place = run.comms.index(comm)
            device = "cpu" if place == 1 else "cuda"
            random = torch.Generator().manual_seed(1 if place < 2 else 2)
            big = torch.randn(5_000_001, generator=random)
            tensors = [big.to(device), big.to(torch.bfloat16).to(device), torch.arange(7).to(device)]
            for tensor in tensors:
                tensor += 1  # The sync comes after this work.
            infos = [zpccl.TensorInfo.from_torch(tensor, str(i)) for i, tensor in enumerate(tensors)]
            comm.sync_shared_state(zpccl.SharedState(infos))
            return [tensor.cpu().view(torch.uint8) for tensor in tensors]

        first, *others = run.all(sync)
        expected = torch.randn(5_000_001, generator=torch.Generator().manual_seed(1)) + 1
        assert torch.equal(first[0], expected.view(torch.uint8))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_calls_of_many_streams_at_once() -> None:
    """Each call waits for the work of its own stream, slow or not. The input may be overwritten once it has begun."""
    calls, size = 16, 1_000_003
    slow = 20_000_000  # Cycles: some 10 ms.

    with local_run(2) as run:

        def reduce(comm: zpccl.Communicator) -> list[bool]:
            rounds = []
            for number in range(4):
                handles, results = [], []
                for tag in range(calls):
                    with torch.cuda.stream(torch.cuda.Stream()):
                        send, result = torch.zeros(size, device="cuda"), torch.full((size,), -1.0, device="cuda")
                        torch.cuda._sleep(slow if tag % 4 == number else 0)
                        send += tag + 1
                        handles.append(comm.all_reduce_async(send, result, tag=tag))
                        send.zero_()
                        results.append(result)
                assert all(handle.wait()[0] for handle in handles)
                rounds += [bool((result == 2 * (tag + 1)).all()) for tag, result in enumerate(results)]
            return rounds

        assert run.all(reduce) == [[True] * 4 * calls] * 2


def test_a_call_waits_for_its_own_copies_only() -> None:
    """Work that is put on the caller's stream after the call was made delays neither the call nor its result."""
    with local_run(2) as run:

        def reduce(comm: zpccl.Communicator) -> bool:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = torch.ones(1000, device="cuda")
                comm.all_reduce(tensor, tensor)  # So that all memory is allocated.
                handle = comm.all_reduce_async(tensor, tensor)
                torch.cuda._sleep(6_000_000_000)  # Cycles: some 3 s.
                handle.wait()
            return not stream.query()

        assert run.all(reduce) == [True, True]
        torch.cuda.synchronize()


def test_a_graph_that_is_being_captured_is_refused() -> None:
    """A call cannot be part of a CUDA graph. It is refused before anything is sent, and the group goes on."""
    with local_run(2) as run:
        tensor, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
        state = zpccl.SharedState([zpccl.TensorInfo.from_torch(tensor, "x")])
        with torch.cuda.graph(graph):
            tensor += 1
            for call in (lambda: run.comms[0].all_reduce(tensor), lambda: run.comms[0].sync_shared_state(state)):
                with pytest.raises(zpccl.InvalidArgument, match="CUDA graph"):
                    call()
        graph.replay()
        assert run.all(lambda comm: float(comm.all_reduce(tensor)[0])) == [4.0, 4.0]


def test_a_result_is_that_of_the_same_call_on_the_cpu() -> None:
    """Bit for bit, quantised or not, of all dtypes that a GPU is used with."""
    options = zpccl.QuantizationOptions(
        quantized_datatype=zpccl.DataType.UINT8, algorithm=zpccl.QuantizationAlgorithm.MIN_MAX
    )
    with local_run(2) as run:

        def reduce(comm: zpccl.Communicator) -> list[tuple[Any, Any]]:
            random = np.random.default_rng(run.comms.index(comm))
            found = []
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                for quantization in (None, options):
                    host = torch.from_numpy(random.standard_normal(100_003).astype(np.float32)).to(dtype)
                    results = []
                    for tensor in (host, host.cuda()):
                        result = torch.empty_like(tensor)
                        comm.all_reduce(tensor, result, quantization_options=quantization)
                        results.append(result.cpu())
                    found.append((results[0], results[1]))
            return found

        for found in run.all(reduce):
            assert all(torch.equal(of_cpu, of_gpu) for of_cpu, of_gpu in found)
