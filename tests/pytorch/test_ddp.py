"""DistributedDataParallel on the backend, in real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytorch.programs import ROOT, Processes, torchrun

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

DIGITS = ROOT / "examples" / "ddp_digits.py"


def train(backend: str, ranks: int, directory: Path) -> tuple[list[str], dict[str, Any]]:
    """The losses that the example prints, and its weights.

    A Gloo thread that frees its last call while Python ends aborts the process (issue 190489 of PyTorch). This happens
    after the barrier at the end of the example, when everything is printed and saved.
    """
    weights = directory / f"{backend}.pt"
    options = ("--backend", backend, "--epochs", "2", "--samples", "400", "--save", weights)
    output = torchrun(ranks, DIGITS, *options, may_abort=backend == "gloo")
    return re.findall(r"loss (\S+)", output), torch.load(weights)


def test_two_ranks_train_as_on_gloo_bit_for_bit(tmp_path: Path) -> None:
    """A sum of two does not depend on their order."""
    (losses, weights), (expected_losses, expected) = (train(name, 2, tmp_path) for name in ("zpccl", "gloo"))
    assert losses == expected_losses and len(losses) == 2
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_three_ranks_train_as_on_gloo_but_for_rounding(tmp_path: Path) -> None:
    """Three are summed in another order, so the last bits differ, and training enlarges the difference."""
    (losses, weights), (expected_losses, expected) = (train(name, 3, tmp_path) for name in ("zpccl", "gloo"))
    assert [float(loss) for loss in losses] == pytest.approx([float(loss) for loss in expected_losses], rel=1e-5)
    assert all(torch.allclose(weights[name], expected[name], rtol=1e-3, atol=1e-5) for name in expected)


NO_END = """
import torch, torch.distributed as dist, zpccl.torch
dist.init_process_group("zpccl")
tensor = torch.ones(3)
dist.all_reduce(tensor)
subgroup = dist.new_group([0, 1], backend="zpccl")
dist.all_reduce(tensor, group=subgroup)
dist.destroy_process_group(subgroup)
import torch.distributed._functional_collectives as functional
assert functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [2.0, 2.0]
assert functional.all_gather_tensor(torch.ones(2), 0, dist.group.WORLD).shape == (4,)
assert functional.reduce_scatter_tensor(torch.ones(2), "sum", 0, dist.group.WORLD).tolist() == [2.0]
found = [None, None]
dist.all_gather_object(found, dist.get_rank())
print(tensor.tolist(), found)
"""


def test_a_program_may_end_without_destroying_its_groups() -> None:
    with Processes(NO_END, 2) as processes:
        assert [processes.end(rank) for rank in range(2)] == ["[4.0, 4.0, 4.0] [0, 1]\n"] * 2


CHECKPOINTS = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as checkpoint, zpccl.torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
dist.init_process_group("zpccl")
model = torch.nn.Linear(2, 2)
whole = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()} if dist.get_rank() == 0 else {}
set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
state = model.state_dict()
checkpoint.async_save(state, checkpoint_id=sys.argv[1]).result()
model.weight.data.zero_()
checkpoint.load(state, checkpoint_id=sys.argv[1])
print(model.weight.tolist(), model.bias.tolist())
dist.destroy_process_group()
"""


def test_checkpoints_of_torch(tmp_path: Path) -> None:
    """In the background, and with the state of rank 0: torch asks for the group's devices."""
    with Processes(CHECKPOINTS, 2, str(tmp_path)) as processes:
        assert [processes.end(rank) for rank in range(2)] == ["[[1.0, 1.0], [1.0, 1.0]] [1.0, 1.0]\n"] * 2


COMPILED = """
import torch, torch.distributed as dist, zpccl.torch
dist.init_process_group("zpccl")
norm = torch.nn.BatchNorm1d(2)  # Its buffers are broadcast before each forward pass.
model = torch.compile(torch.nn.parallel.DistributedDataParallel(norm), backend="eager")
model(torch.tensor([[1.0, 2.0], [3.0, 5.0]])).sum().backward()
@torch.compile(backend="eager")
def total(tensor):
    tensor = tensor + dist.get_rank()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.barrier()
    return tensor * 2
print(norm.bias.grad.tolist(), total(torch.ones(2)).tolist())
dist.destroy_process_group()
"""


def test_a_model_may_be_compiled() -> None:
    """torch.compile runs the collectives as they are, and does not try to compile them."""
    with Processes(COMPILED, 2) as processes:
        assert [processes.end(rank) for rank in range(2)] == ["[2.0, 2.0] [6.0, 6.0]\n"] * 2


JOINED = """
import gc, torch, torch.distributed as dist, zpccl.torch
dist.init_process_group("zpccl")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    def forward(self, weight):
        return weight * self.used.sum()
model = torch.nn.parallel.DistributedDataParallel(Model(), find_unused_parameters=True)
found = []
with model.join(divide_by_initial_world_size=False):
    for step in range(1 + 2 * dist.get_rank()):  # Rank 1 has more batches.
        model.zero_grad()
        loss = model(dist.get_rank() + 1.0)
        gc.collect()
        loss.backward()
        found.append(model.module.used.grad.tolist())
assert model.module.unused.grad is None
print(found)
dist.destroy_process_group()
"""


def test_ranks_with_fewer_batches_join() -> None:
    """L1: their gradients count as zero, and the mean is over the ranks that still have batches."""
    with Processes(JOINED, 2) as processes:
        assert processes.end(0) == "[[1.5, 1.5]]\n"
        assert processes.end(1) == "[[1.5, 1.5], [2.0, 2.0], [2.0, 2.0]]\n"


LOSS = """
import sys, torch, torch.distributed as dist, zpccl, zpccl.torch
dist.init_process_group("zpccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100).to(sys.argv[1]))
step = 0
try:
    while True:
        model(torch.ones(2, 100, device=sys.argv[1])).sum().backward()
        step += 1
        if step == 3:
            print("trains", flush=True)
except RuntimeError as error:
    print(type(dist.group.WORLD.error).__name__, type(dist.group.WORLD.error).__name__ in str(error) or str(error))
dist.destroy_process_group()
"""


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_ends_the_backward_pass_of_all(victim: int, device: str) -> None:
    """L1: if rank 0 dies, the master and the store die with it. On a GPU, the others can still use it."""
    with Processes(LOSS, 3, device) as processes:
        assert [processes.line(rank) for rank in range(3)] == ["trains"] * 3
        processes.ranks[victim].kill()
        for rank in {0, 1, 2} - {victim}:
            error, _, text = processes.end(rank).strip().partition(" ")
            assert error in ("PeerLost", "MasterUnreachable"), (error, text)
