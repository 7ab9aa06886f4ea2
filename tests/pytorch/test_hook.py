"""DDP that loses peers and goes on."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from e2e.local import finish, local_run
from fake_device import FakeDevice
from interpreter import without_collector

import zpccl
from pytorch.programs import ROOT, Processes

torch = pytest.importorskip("torch")
dist = torch.distributed
gpus = pytest.importorskip("pytorch.gpu", exc_type=ImportError)
hook = pytest.importorskip("zpccl.torch.hook", exc_type=ImportError)

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


class Bucket:
    """A bucket as DDP makes it: gradients are views of its buffer."""

    def __init__(self, parameters: list[Any], gradients: list[Any], index: int, is_last: bool) -> None:
        self._parameters, self._index, self._is_last = parameters, index, is_last
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])
        parts = self._buffer.split([gradient.numel() for gradient in gradients])
        self._gradients = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]

    def parameters(self) -> list[Any]:
        return self._parameters

    def gradients(self) -> list[Any]:
        return self._gradients

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Any:
        return self._buffer


def a_model() -> list[Any]:
    shapes = ((3, 2), (4,), (2, 2, 2))
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    return [torch.nn.Parameter(torch.ones(s, dtype=d)) for s, d in zip(shapes, dtypes, strict=True)]


def step(run: Callable[..., Any], parameters: list[Any], value: float, layout: list[list[int]]) -> list[float]:
    """A backward pass with gradients value, 2 value, 3 value. Returns the first elements of the results.

    Parameters and gradients may be on a fake GPU.
    """
    buckets = [
        Bucket(
            [parameters[i] for i in places],
            [torch.full_like(parameters[i], (i + 1) * value) for i in places],
            number,
            number == len(layout) - 1,
        )
        for number, places in enumerate(layout)
    ]
    futures = [run(None, bucket) for bucket in buckets]
    assert all(future.wait() is bucket.buffer() for future, bucket in zip(futures, buckets, strict=True))
    found = {}
    for places, bucket in zip(layout, buckets, strict=True):
        for place, gradient in zip(places, bucket.gradients(), strict=True):
            assert (gradient == gradient.flatten()[0]).all()
            found[place] = float(gradient.flatten()[0])
    return [found[place] for place in sorted(found)]


LAYOUTS = [[[2], [1, 0]], [[0, 1, 2]]]


def test_the_example_goes_on_alone_if_all_others_are_lost_in_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    pytest.importorskip("rich")
    example = importlib.import_module("ddp_elastic")
    with local_run(2) as run:
        state = zpccl.SharedState([zpccl.TensorInfo.from_torch(torch.ones(2), "weights")])
        synced = run.start(example.sync, run.comms[0], state)
        run.comms[1].close()
        finish(synced)
        assert example.agreed_members(run.comms[0]) == (run.comms[0].peer_id,)


def average_of(values: list[float], weights: list[float]) -> list[list[float]]:
    """The results of two peers, each with gradients of one value, as the mean of this many samples."""
    with local_run(2) as run:

        def train(comm: zpccl.Communicator) -> list[float]:
            place = run.comms.index(comm)
            parameters = [torch.nn.Parameter(torch.ones(2))]
            made = hook.fault_tolerant_hook(comm, parameters, samples=lambda: weights[place])
            return list(made(None, Bucket(parameters, [torch.full((2,), values[place])], 0, True)).wait().tolist())

        return run.all(train)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_of_no_samples_do_not_count_whatever_they_are(value: float) -> None:
    """The mean of no samples is NaN."""
    assert average_of([1.5, value], [4, 0]) == [[1.5, 1.5]] * 2


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_cannot_be(weight: float) -> None:
    with local_run(1) as run:
        parameters = [torch.nn.Parameter(torch.ones(2))]
        made = hook.fault_tolerant_hook(run.comms[0], parameters, samples=lambda: weight)
        with pytest.raises(zpccl.InvalidArgument, match="samples"):
            made(None, Bucket(parameters, [torch.ones(2)], 0, True))


@pytest.mark.parametrize("weights", [None, (1, 3), (0, 2), (0, 0)])
def test_buckets_may_be_cut_otherwise_on_each_peer(weights: tuple[int, int] | None) -> None:
    """A peer in its first step has other buckets than peers that are not."""
    with local_run(2) as run:

        def train(comm: zpccl.Communicator) -> list[list[float]]:
            place = run.comms.index(comm)
            parameters = a_model()
            samples = (lambda: float(weights[place])) if weights else None
            made = hook.fault_tolerant_hook(comm, parameters, samples=samples, tag=5)
            found = [step(made, parameters, (1 + place) * scale, LAYOUTS[place]) for scale in (1.0, 8.0)]
            assert made.peer_ids == comm.peer_ids
            return found

        mean = {None: 1.5, (1, 3): 1.75, (0, 2): 2.0, (0, 0): 0.0}[weights]
        expected = [[mean * scale * (i + 1) for i in range(3)] for scale in (1, 8)]
        assert run.all(train) == [expected, expected]


def test_gradients_on_a_gpu(gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """One peer has a GPU, the other has none."""
    future = torch.futures.Future
    monkeypatch.setattr(torch.futures, "Future", lambda devices: future())  # The installed torch may support no GPUs.
    with local_run(2) as run:

        def train(comm: zpccl.Communicator) -> list[float]:
            place = run.comms.index(comm)
            parameters = [gpus.on_gpu(parameter.detach()) if place else parameter for parameter in a_model()]
            made = hook.fault_tolerant_hook(comm, [each.requires_grad_() for each in parameters], samples=lambda: 2.0)
            return step(made, parameters, 1.0 + place, LAYOUTS[place])

        assert run.all(train) == [[1.5, 3.0, 4.5]] * 2
    assert gpu.under_way == 0 and gpu.log


def test_parameters_on_several_devices_are_refused() -> None:
    with pytest.raises(zpccl.InvalidArgument, match="several devices"):
        parameters = [torch.nn.Parameter(torch.ones(2, device=device)) for device in ("cpu", "meta")]
        hook.fault_tolerant_hook(zpccl.Communicator("127.0.0.1:1"), parameters)


def test_alone_it_goes_on_with_its_own() -> None:
    with local_run(2) as run:
        one, other = run.comms
        other.close()
        parameters = a_model()
        made = hook.fault_tolerant_hook(one, parameters, samples=lambda: 3.0)
        assert step(made, parameters, 2.0, LAYOUTS[0]) == [2.0, 4.0, 6.0]
        assert made.peer_ids == (one.peer_id,)


def test_alone_a_step_is_freed_without_a_collection_of_garbage() -> None:
    """B1: its gradients, and what the caller has in memory."""
    with local_run(2) as run:
        run.comms[1].close()
        parameters = a_model()
        made = hook.fault_tolerant_hook(run.comms[0], parameters)
        with without_collector():
            bucket = Bucket(parameters, [torch.full_like(parameter, 2.0) for parameter in parameters], 0, True)
            made(None, bucket)
            gradient = weakref.ref(bucket.gradients()[0])
            del bucket
            assert gradient() is None


def test_too_few_peers_are_told_and_keep_their_gradients() -> None:
    """S2, L1: all remaining peers, once there are fewer than the run needs."""
    with local_run(3, min_world_size=3) as run:
        run.comms[2].close()

        def train(comm: zpccl.Communicator) -> list[list[float]]:
            parameters = a_model()
            bucket = Bucket(parameters, [torch.full_like(parameter, 2.0) for parameter in parameters], 0, True)
            with pytest.raises(zpccl.TooFewPeers):
                hook.fault_tolerant_hook(comm, parameters)(None, bucket)
            return [gradient.unique().tolist() for gradient in bucket.gradients()]

        trained = [run.start(train, comm) for comm in run.comms[:2]]
        assert [finish(future) for future in trained] == [[[2.0]] * 3] * 2


def test_parameters_of_another_model_are_refused() -> None:
    with local_run(2) as run:
        parameters = a_model()
        with pytest.raises(zpccl.InvalidUsage, match="another model"):
            step(hook.fault_tolerant_hook(run.comms[0], a_model()), parameters, 1.0, LAYOUTS[0])
        with pytest.raises(zpccl.InvalidUsage, match="reduces 1 gradients"):
            step(hook.fault_tolerant_hook(run.comms[0], parameters), parameters, 1.0, [[0]])
        with pytest.raises(zpccl.InvalidArgument):
            hook.fault_tolerant_hook(run.comms[0], [])
        with pytest.raises(zpccl.InvalidArgument, match="not a Communicator"):
            hook.fault_tolerant_hook(None, parameters)


def test_a_sparse_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    bucket = Bucket(parameters, [torch.ones(2)], 0, True)
    monkeypatch.setattr(bucket, "buffer", torch.ones(2).to_sparse)
    with pytest.raises(zpccl.InvalidArgument, match="sparse=False"):
        hook.fault_tolerant_hook(zpccl.Communicator("127.0.0.1:1"), parameters)(None, bucket)


MODEL = """
import os, sys, torch, torch.distributed as dist, zpccl, zpccl.torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank = int(os.environ["RANK"])

class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2)) for _ in range(3)])

    def forward(self, branch):
        return 2.0 ** rank * self.branches[branch].sum()
"""

BRANCHES = (
    MODEL
    + """
with zpccl.Communicator() as comm:
    while comm.world_size < 2:
        comm.update_topology()
    for is_view in (False, True):
        model = torch.nn.parallel.DistributedDataParallel(
            Branches(), find_unused_parameters=True, gradient_as_bucket_view=is_view
        )
        weight = {"None": None, "equal": lambda: 1.0, "first": lambda: 1.0 - rank}[sys.argv[1]]
        model.register_comm_hook(None, zpccl.torch.fault_tolerant_hook(comm, model.parameters(), samples=weight))
        for branch, to_none in ((rank, True), (rank, True), (rank, False), (0, True)):
            model.zero_grad(set_to_none=to_none)
            model(branch).backward()
            print(*("none" if each.grad is None else each.grad[0].item() for each in model.module.branches))
"""
)


@pytest.mark.parametrize(("weights", "means"), [("None", "0.5 1.0"), ("equal", "0.5 1.0"), ("first", "1.0 0.0")])
def test_all_get_the_gradients_of_parameters_that_some_have_not_used(weights: str, means: str) -> None:
    """S1: as with other backends. A parameter that no peer has used does not change."""
    with a_master() as address, Processes(BRANCHES, 2, weights, ZPCCL_MASTER=address) as two:
        ends = [two.end(rank).splitlines() for rank in range(2)]
    expected = [f"{means} none"] * 3 + ["1.0 none none" if weights == "first" else "1.5 none none"]
    assert ends == [expected * 2] * 2


ANEW = (
    MODEL
    + """
weight = 1.0
with zpccl.Communicator() as comm:
    while comm.world_size < 2:
        comm.update_topology()
    bare = Branches()
    hook = zpccl.torch.fault_tolerant_hook(comm, bare.parameters(), samples=lambda: weight)
    for branch, weight in ((rank, -1.0), (1 + rank, 1.0)):
        model = torch.nn.parallel.DistributedDataParallel(bare, find_unused_parameters=True)
        model.register_comm_hook(None, hook)
        model.zero_grad()
        try:
            model(branch).backward()
        except RuntimeError as error:
            print("samples()" in str(error))
        else:
            print(*("none" if each.grad is None else each.grad[0].item() for each in bare.branches))
        del model
"""
)


def test_a_step_that_failed_leaves_no_parameter_used() -> None:
    """S1: DDP is then created anew, with the same hook."""
    with a_master() as address, Processes(ANEW, 2, ZPCCL_MASTER=address) as two:
        assert [two.end(rank) for rank in range(2)] == ["True\nnone 0.5 1.0\n"] * 2


PROGRAM = """
import hashlib, os, sys, threading, torch, torch.distributed as dist, zpccl, zpccl.torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
torch.set_num_threads(1)
local = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.Linear(300, 300), torch.nn.Linear(300, 5))
model = torch.nn.parallel.DistributedDataParallel(local, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
comm = zpccl.Communicator()
comm.connect()
while comm.world_size < 3:
    comm.update_topology()
hook = zpccl.torch.fault_tolerant_hook(comm, model.parameters(), samples=lambda: 2)
model.register_comm_hook(None, hook)
random = torch.Generator().manual_seed(int(os.environ["RANK"]))
is_told = threading.Event()
threading.Thread(target=lambda: (sys.stdin.readline(), is_told.set()), daemon=True).start()
step, is_over, goes_on = 0, False, False
while not is_over:
    optimizer.zero_grad()
    model(torch.randn(2, 20, generator=random)).square().sum().backward()
    optimizer.step()
    step += 1
    if step == 5:
        print("trains", flush=True)
    if len(hook.peer_ids) == 2 and not goes_on:
        goes_on = True
        print("goes on", flush=True)
    while True:  # Both end at the same step.
        try:
            is_over = comm.all_reduce(torch.tensor([int(is_told.is_set())]))[0] > 0
            break
        except zpccl.PeerLost:
            continue
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(step, len(hook.peer_ids), digest)
comm.close()
"""


@contextlib.contextmanager
def a_master() -> Iterator[str]:
    with zpccl.MasterNode("127.0.0.1:0", recovery_grace=0) as master:
        yield master.address


def test_a_peer_that_is_killed_leaves_the_others_with_equal_weights() -> None:
    """S1, L2: real processes, each with its own samples, killed while they train."""
    with a_master() as address, Processes(PROGRAM, 3, ZPCCL_MASTER=address) as processes:
        assert [processes.line(rank) for rank in range(3)] == ["trains"] * 3
        processes.ranks[1].kill()
        processes.ranks[1].wait()
        assert [processes.line(rank) for rank in (0, 2)] == ["goes on"] * 2
        processes.tell(0)
        ends = [processes.end(rank).split() for rank in (0, 2)]
        assert ends[0] == ends[1] and ends[0][1] == "2"


@pytest.mark.slow
def test_the_elastic_example() -> None:
    """Hook, sampler and shared state together. One peer may finish before the other one comes."""
    example = ROOT / "examples" / "ddp_elastic.py"
    with (
        a_master() as address,
        Processes(example, 2, "--epochs", "20", "--samples", "1000", ZPCCL_MASTER=address) as two,
    ):
        ends = [two.end(rank).splitlines()[-2:] for rank in range(2)]
    assert all(end[0].startswith("epoch 19 is over") and end[1].startswith("accuracy") for end in ends)
    if ends[0][0].endswith("2 peers"):
        assert ends[0] == ends[1]
