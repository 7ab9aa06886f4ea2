"""Torch CPU tensors in place of numpy arrays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.local import Run, local_run
from fake_device import FakeDevice

import zpccl
from zpccl import arguments, limits
from zpccl.engine.devices import CudaDevice
from zpccl.engine.tensors import new_tensor, view
from zpccl.protocol.paths import Paths
from zpccl.state import regions
from zpccl.types import DataType, QuantizationOptions, ReduceOp

torch = pytest.importorskip("torch")
gpus = pytest.importorskip("pytorch.gpu", exc_type=ImportError)

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


def test_all_public_names_can_be_imported_without_torchft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.delitem(sys.modules, "zpccl.torch.torchft_group", raising=False)
    names: dict[str, object] = {}
    exec("from zpccl.torch import *", names)
    assert names.keys() >= {"ElasticSampler", "fault_tolerant_hook"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Run]:
    with local_run(2) as run:
        yield run


@pytest.mark.parametrize("datatype", list(DataType))
def test_reduces_every_dtype(pair: Run, datatype: DataType) -> None:
    dtype = datatype.to_torch_dtype()
    assert DataType.from_torch_dtype(dtype) is datatype

    def reduce(comm: zpccl.Communicator) -> Any:
        send = torch.ones(33, dtype=torch.float32).to(dtype)
        recv = torch.zeros(33, dtype=torch.float32).to(dtype)
        comm.all_reduce(send, recv, op=ReduceOp.SUM)
        comm.all_reduce(send, send, op=ReduceOp.SUM)
        new = comm.all_reduce(send.reshape(3, 11), op=ReduceOp.SUM)
        assert new.shape == (3, 11) and new.dtype is dtype
        return [t.to(torch.float32).flatten().tolist() for t in (recv, send, new)]

    assert pair.all(reduce) == [[[2.0] * 33, [2.0] * 33, [4.0] * 33]] * 2


def test_quantises_bfloat16(pair: Run) -> None:
    """S1: the results of both are equal bit for bit."""

    def reduce(comm: zpccl.Communicator) -> Any:
        send = torch.linspace(0, 1, 1000).to(torch.bfloat16)
        comm.all_reduce(send, send, op=ReduceOp.AVG, quantization_options=QuantizationOptions())
        return send

    one, other = pair.all(reduce)
    assert torch.equal(one, other) and torch.allclose(one.float(), torch.linspace(0, 1, 1000), atol=0.02)


def test_numpy_and_torch_meet(pair: Run) -> None:
    import numpy as np

    def reduce(comm: zpccl.Communicator) -> float:
        tensor = torch.ones(5) if comm is pair.comms[0] else np.ones(5, np.float32)
        return float(comm.all_reduce(tensor)[0])

    assert pair.all(reduce) == [2.0, 2.0]


def test_parameters_are_reduced_without_a_graph(pair: Run) -> None:
    def reduce(comm: zpccl.Communicator) -> Any:
        parameter = torch.nn.Parameter(torch.ones(4))
        comm.all_reduce(parameter, parameter, op=ReduceOp.SUM)
        new = comm.all_reduce(parameter)
        assert parameter.requires_grad and not new.requires_grad
        return parameter.tolist(), new.tolist()

    assert pair.all(reduce) == [([2.0] * 4, [4.0] * 4)] * 2


BAD: dict[str, Any] = {
    "meta": lambda: torch.ones(4, device="meta"),
    "not contiguous": lambda: torch.ones(4, 4).t()[1:],
    "every other": lambda: torch.ones(8)[::2],
    "sparse": lambda: torch.eye(3).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "expanded": lambda: torch.ones(1).expand(4),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", BAD)
def test_tensors_that_cannot_be_used_are_refused(pair: Run, what: str) -> None:
    with pytest.raises(zpccl.InvalidArgument):
        pair.comms[0].all_reduce(BAD[what]())
    with pytest.raises(zpccl.InvalidArgument):
        zpccl.TensorInfo.from_torch(BAD[what](), "x")


def test_tensor_without_elements_is_reduced_but_is_no_state(pair: Run) -> None:
    assert pair.all(lambda comm: comm.all_reduce(torch.ones(0)).shape) == [(0,)] * 2
    with pytest.raises(zpccl.InvalidArgument):
        zpccl.TensorInfo.from_torch(torch.ones(0), "x")


def test_a_tensor_on_another_device_is_refused_with_what_to_do(pair: Run) -> None:
    with pytest.raises(zpccl.InvalidArgument, match=r"meta.*tensor\.cpu\(\)"):
        pair.comms[0].all_reduce(torch.ones(4, device="meta"))


def on_gpu(*values: float, dtype: Any = torch.float32) -> Any:
    return gpus.on_gpu(values, dtype)


def numbers(tensor: Any) -> list[float]:
    """The contents of the device, which nobody else may read."""
    return [float(value) for value in gpus.on_cpu(tensor).flatten()]


def place_of(pair: Run, comm: zpccl.Communicator) -> int:
    return int(comm is not pair.comms[0])


COLLECTIVES: dict[str, Any] = {
    "new": lambda comm, place: numbers(comm.all_reduce(on_gpu(1, 2))) == [2, 4],
    "bfloat16": lambda comm, place: numbers(comm.all_reduce(on_gpu(256, 1, dtype=torch.bfloat16))) == [512, 2],
    "gather": lambda comm, place: sorted(numbers(comm.all_gather(on_gpu(place)).tensor)) == [0, 1],
    "all to all": lambda comm, place: sorted(numbers(comm.all_to_all(on_gpu(place, place)).tensor)) == [0, 1],
    "scatter": lambda comm, place: numbers(comm.reduce_scatter(on_gpu(1, 1, 1)).tensor)[0] == 2,
}


@pytest.mark.parametrize("what", COLLECTIVES)
def test_collectives_of_tensors_on_a_gpu(pair: Run, gpu: FakeDevice, what: str) -> None:
    """Results are on the GPU too, and no copy is in progress after the call."""
    assert pair.all(lambda comm: COLLECTIVES[what](comm, place_of(pair, comm))) == [True, True]
    assert gpu.under_way == 0 and sum(entry[0] == "out" for entry in gpu.log) == 2


def test_rows_come_to_a_gpu_by_way_of_others(pair: Run, gpu: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets the rows of all in host memory, and its own row on the GPU."""
    monkeypatch.setattr(Paths, "broken", lambda self, members, now_ns: [tuple(members[:2])])

    def exchange(comm: zpccl.Communicator) -> list[float]:
        place = place_of(pair, comm)
        result = comm.all_to_all(on_gpu(place, place), tag=9)  # So that no plan from before is left.
        assert result.info.algorithm is zpccl.Algorithm.RING
        return sorted(numbers(result.tensor))

    assert pair.all(exchange) == [[0, 1], [0, 1]]
    assert gpu.under_way == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tensor_on_a_gpu_is_reduced_in_place(pair: Run, gpu: FakeDevice, is_async: bool) -> None:
    def reduce(comm: zpccl.Communicator) -> list[float]:
        tensor = on_gpu(1, 2, 3)
        if is_async:
            handle = comm.all_reduce_async(tensor, tensor)
            assert [handle.wait()[0] for _ in range(2)] == [True, True]
            assert numbers(handle.result) == numbers(tensor)
        else:
            comm.all_reduce(tensor, tensor)
        return numbers(tensor)

    assert pair.all(reduce) == [[2.0, 4.0, 6.0]] * 2
    assert sum(entry[0] == "in" for entry in gpu.log) == 2, "once for each, however often somebody waits"


def test_a_broadcast_from_a_gpu_to_a_cpu(pair: Run, gpu: FakeDevice) -> None:
    """Nothing is copied if nothing changes or nothing is used."""

    def broadcast(comm: zpccl.Communicator) -> list[float]:
        is_root = place_of(pair, comm) == 0
        tensor = on_gpu(5, 6) if is_root else torch.zeros(2)
        comm.broadcast(tensor, is_root=is_root)
        return [float(value) for value in tensor.as_subclass(torch.Tensor)]

    assert pair.all(broadcast) == [[5.0, 6.0]] * 2
    assert [entry[0] for entry in gpu.log] == ["out", "done"]
    gpu.log.clear()

    def receive(comm: zpccl.Communicator) -> list[float]:
        is_root = place_of(pair, comm) == 0
        tensor = torch.tensor([7.0]) if is_root else on_gpu(0)
        comm.broadcast(tensor, is_root=is_root)
        return [float(value) for value in tensor.as_subclass(torch.Tensor)]

    assert pair.all(receive) == [[7.0]] * 2
    assert [entry[0] for entry in gpu.log] == ["in", "done"]


def test_a_collective_that_fails_leaves_a_tensor_on_a_gpu_alone(pair: Run, gpu: FakeDevice) -> None:
    """S4: even without `restore`."""

    def reduce(comm: zpccl.Communicator) -> list[float]:
        tensor = on_gpu(*([1.0] * (3 + place_of(pair, comm))))
        with pytest.raises(zpccl.CollectiveMismatch):
            comm.all_reduce(tensor, tensor, restore=False)
        return numbers(tensor)

    assert pair.all(reduce) == [[1.0] * 3, [1.0] * 4]
    assert "in" not in [entry[0] for entry in gpu.log]


def test_many_tensors_on_a_gpu(pair: Run, gpu: FakeDevice) -> None:
    def reduce(comm: zpccl.Communicator) -> list[list[float]]:
        tensors = [on_gpu(tag, 1) for tag in range(5)]
        descriptors = [
            zpccl.ReduceOpDescriptor.from_torch(
                tensor,
                tensor,
                zpccl.ReduceDescriptor(2, ReduceOp.SUM, tag, zpccl.ReduceOperandDescriptor(DataType.FLOAT)),
            )
            for tag, tensor in enumerate(tensors)
        ]
        comm.all_reduce_multiple_with_retry(descriptors)
        return [numbers(tensor) for tensor in tensors]

    assert pair.all(reduce) == [[[2.0 * tag, 2.0] for tag in range(5)]] * 2


def test_parts_of_one_tensor_on_a_gpu_do_not_overlap_in_a_call(pair: Run, gpu: FakeDevice) -> None:
    """Another view of the whole tensor counts as in place."""

    def reduce(comm: zpccl.Communicator) -> list[float]:
        tensor = on_gpu(1, 2, 3, 4)
        comm.all_reduce(tensor, tensor.view(2, 2))
        return numbers(tensor)

    assert pair.all(reduce) == [[2.0, 4.0, 6.0, 8.0]] * 2
    tensor = on_gpu(1, 2, 3, 4)
    with pytest.raises(zpccl.InvalidArgument, match="share"):
        pair.comms[0].all_reduce(tensor[:3], tensor[1:])


def test_a_copy_that_fails_is_an_error_before_the_call_is_made(pair: Run, gpu: FakeDevice) -> None:
    """No other peer hears of it."""
    gpu.fail_at = 0
    with pytest.raises(RuntimeError, match="fell off"):
        pair.comms[0].all_reduce(on_gpu(1))
    assert pair.all(lambda comm: numbers(comm.all_reduce(on_gpu(1)))) == [[2.0]] * 2


def test_room_on_a_gpu_for_a_result_is_made_before_the_call(gpu: FakeDevice) -> None:
    """The caller allocates it for the present members; it is allocated anew only if the group has grown."""
    call = arguments.all_gather(on_gpu(1, 2), None, 0, 2)
    assert gpu.stagings == 2 and call.recv_for(2, 1).count == 4 and gpu.stagings == 2
    assert call.recv_for(3, 0).count == 6 and gpu.stagings == 3
    with pytest.raises(zpccl.InvalidArgument, match="6 are needed"):
        arguments.all_gather(on_gpu(1, 2), on_gpu(0, 0, 0, 0), 0, 3)


def test_a_tensor_without_elements_needs_no_copies(pair: Run, gpu: FakeDevice) -> None:
    assert pair.all(lambda comm: comm.all_reduce(on_gpu()).shape) == [(0,)] * 2
    assert gpu.log == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_collectives_of_a_gpu(pair: Run) -> None:
    """The call waits for work queued before it. The result is there when the call returns."""

    def reduce(comm: zpccl.Communicator) -> bool:
        tensor = torch.zeros(10_000_001, device="cuda")
        for _ in range(100):
            tensor += 1
        comm.all_reduce(tensor, tensor)
        new = comm.all_reduce(tensor.to(torch.bfloat16))
        return bool((tensor == 200).all()) and bool((new == 400).all()) and new.is_cuda

    assert pair.all(reduce) == [True, True]


@pytest.fixture
def mesh() -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_of_a_distributed_tensor_the_local_part_is_used(pair: Run, mesh: Any) -> None:
    """It has the shape of the whole tensor, and no memory of its own."""
    from torch.distributed.tensor import DTensor, Shard

    whole = (4, 3)
    tensors = [DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], shape=whole, stride=(3, 1)) for _ in range(6)]

    def reduce(comm: zpccl.Communicator) -> list[Any]:
        mine = tensors[place_of(pair, comm) :: 2]
        comm.all_reduce(mine[0], mine[0])
        new = comm.all_reduce(mine[0])
        rows = comm.all_gather(mine[1]).tensor
        comm.broadcast(mine[2], is_root=place_of(pair, comm) == 0)
        return [mine[0].to_local().sum().item(), new.shape, new.sum().item(), rows.shape]

    assert pair.all(reduce) == [[12.0, (2, 3), 24.0, (2, 2, 3)]] * 2
    region = zpccl.TensorInfo.from_torch(tensors[0], "x").region()
    assert region.address_range()[1] == tensors[0].to_local().data_ptr()


def test_a_tensor_without_memory_of_its_own_is_refused(pair: Run) -> None:
    class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
        @classmethod
        def __torch_dispatch__(cls, *arguments: Any, **keywords: Any) -> Any:
            raise NotImplementedError

    tensor = torch.Tensor._make_wrapper_subclass(Wrapper, (4,), dtype=torch.float32)
    with pytest.raises(zpccl.InvalidArgument, match="memory"):
        pair.comms[0].all_reduce(tensor)


def test_shared_state_of_torch_tensors(pair: Run) -> None:
    """S5"""

    def sync(comm: zpccl.Communicator) -> Any:
        is_ahead = comm is pair.comms[0]
        model = torch.nn.Linear(5, 3)
        tensors = {**model.state_dict(), "half": torch.full((7,), float(is_ahead), dtype=torch.bfloat16)}
        state = zpccl.SharedState([zpccl.TensorInfo.from_torch(t, name) for name, t in tensors.items()])
        state.revision = int(is_ahead)
        comm.sync_shared_state(state)
        return state.revision, {name: tensor.float().flatten().tolist() for name, tensor in tensors.items()}

    one, other = pair.all(sync)
    assert one == other and one[0] == 1 and one[1]["half"] == [1.0] * 7


@pytest.mark.parametrize("receiver_on_gpu", [False, True])
def test_shared_state_on_a_gpu(pair: Run, gpu: FakeDevice, receiver_on_gpu: bool) -> None:
    """S5: to and from a device, beside tensors of the host. No copy is in progress after the call."""

    def sync(comm: zpccl.Communicator) -> Any:
        is_sender = comm is pair.comms[0]
        tensors = {
            "half": torch.full((2_500_001,), float(is_sender), dtype=torch.bfloat16),
            "scalar": torch.tensor(float(is_sender), dtype=torch.float16),
            "host": torch.full((5,), int(is_sender)),
        }
        on_gpu = {name for name in ("half", "scalar") if is_sender != receiver_on_gpu}
        infos = [
            zpccl.TensorInfo.from_torch(gpus.on_gpu(tensor) if name in on_gpu else tensor, name)
            for name, tensor in tensors.items()
        ]
        state = zpccl.SharedState(infos)
        comm.sync_shared_state(
            state, zpccl.SharedStateSyncStrategy.SEND_ONLY if is_sender else zpccl.SharedStateSyncStrategy.RECEIVE_ONLY
        )
        return all(bool((tensor == 1).all()) for tensor in tensors.values())

    assert pair.all(sync) == [True, True]
    assert gpu.under_way == 0 and {entry[0] for entry in gpu.log} == {"out", "done"} | (
        {"in"} if receiver_on_gpu else set()
    )


class Stream:
    """A stream of a fake GPU: its work is done at once."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def wait_event(self, event: Event) -> None:
        self.log.append("wait")

    def record_event(self, event: Event) -> Event:
        self.log.append("record")
        return event


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("synchronize")


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_the_order_of_copies_and_events(monkeypatch: pytest.MonkeyPatch, made_in_inference_mode: bool) -> None:
    """Tests the code for CUDA, with replacements for streams, events and torch's own copies."""
    log: list[str] = []
    streams: list[Stream] = []
    is_capturing = False
    empty = torch.empty

    def enter(stream: Stream) -> contextlib.AbstractContextManager[None]:
        streams.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: Stream(log))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(log))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, pin_memory: empty(size, dtype=dtype))
    with torch.inference_mode(made_in_inference_mode):
        tensor = torch.arange(300, dtype=torch.float32).to(torch.bfloat16).reshape(3, 100)
        tensor.requires_grad_(not made_in_inference_mode)
    device = CudaDevice(tensor.device)
    found = regions.DeviceRegion(device, tensor, "x", DataType.BFLOAT16)
    host = regions.region(tensor.clone(), "y")
    assert found.read(2, 500) == host.read(2, 500)
    assert b"".join(bytes(piece) for piece in found.pieces(0, 600, 64)) == bytes(host.read(0, 600))
    found.write(4, bytes(6))
    assert tensor.flatten().tolist()[:6] == [0, 1, 0, 0, 0, 5]
    assert streams[0] is streams[1] is not streams[2], "each way has a stream, so that copies overlap"
    assert log == ["record"] + ["wait", "record", "synchronize"] * 3
    is_capturing = True
    with pytest.raises(zpccl.InvalidArgument, match="CUDA graph"):
        device.mark()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_region_of_a_gpu() -> None:
    """The call waits for work queued before it. Written bytes are there when the call returns."""
    tensor = torch.zeros(20_000_001, dtype=torch.bfloat16, device="cuda")
    for _ in range(100):
        tensor += 1
    found = regions.region(tensor, "x")
    pieces = [bytes(piece) for piece in found.pieces(0, found.nbytes, 1 << 20)]
    assert b"".join(pieces) == torch.full((20_000_001,), 100, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    found.write(2, torch.full((9_000_000,), 7, dtype=torch.bfloat16).view(torch.uint8).numpy())
    assert tensor[0] == 100 and (tensor[1:9_000_001] == 7).all() and (tensor[9_000_001:] == 100).all()
    assert bytes(found.read(0, 4)) == torch.tensor([100, 7], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_torch_tensors_of_shared_state_are_used_in_place() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int8):
        tensor = torch.ones(3, 4, dtype=dtype, requires_grad=dtype.is_floating_point)
        found = zpccl.TensorInfo.from_torch(tensor, "x").region()
        assert found.address_range()[1] == tensor.data_ptr()
        found.write(0, bytes(found.nbytes))
        assert not tensor.any()


CHANGES: dict[str, Any] = {
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "cut": lambda tensor: tensor.untyped_storage().resize_(44),
    "resized": lambda tensor: tensor.resize_(5),
    "other data": lambda tensor: setattr(tensor, "data", torch.ones(7)),
    "other type": lambda tensor: setattr(tensor, "data", torch.ones(12, dtype=torch.int32)),
    "transposed": lambda tensor: setattr(tensor, "data", torch.ones(4, 3).t()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_tensor_that_changed_between_syncs_is_named(pair: Run, what: str) -> None:
    """The error comes before anything is sent, so others only notice the missing peer."""
    tensor = torch.ones(3, 4)
    state = zpccl.SharedState([zpccl.TensorInfo.from_torch(tensor, "layer.weight")])
    CHANGES[what](tensor)
    with pytest.raises(zpccl.InvalidArgument, match=r"'layer\.weight'"):
        pair.comms[0].sync_shared_state(state)


def test_a_tensor_may_move() -> None:
    """Optimisers and model.to() give a parameter new memory of the same size."""
    tensor = torch.ones(12)
    info = zpccl.TensorInfo.from_torch(tensor, "x")
    old = info.region()
    tensor.data = torch.zeros(12)
    assert not any(info.region().read(0, 48)) and bytes(old.read(0, 48)) == torch.ones(12).numpy().tobytes()


@pytest.mark.parametrize("datatype", [None, DataType.BFLOAT16])
def test_a_tensor_may_get_other_memory_during_a_call(datatype: DataType | None) -> None:
    """S4: otherwise the engine would write to memory that was freed."""
    tensor = torch.ones(1000, dtype=torch.float32 if datatype is None else torch.uint16)
    found = view(tensor, "send", writable=True, datatype=datatype)
    tensor.data = torch.zeros(1, dtype=tensor.dtype)
    assert found.owner.data_ptr() == found.address


def test_kinds_must_not_be_mixed_up() -> None:
    import numpy as np

    with pytest.raises(zpccl.InvalidArgument, match="from_torch"):
        zpccl.TensorInfo.from_numpy(torch.ones(3), "x")
    with pytest.raises(zpccl.InvalidArgument, match="not a torch tensor"):
        zpccl.TensorInfo.from_torch(np.ones(3), "x")


def test_a_view_that_negates_its_memory_is_refused() -> None:
    """S5: its bytes differ from those of its elements."""
    tensor = torch.tensor([1 + 2j]).conj().imag
    assert tensor.is_contiguous() and tensor.tolist() == [-2.0]
    with pytest.raises(zpccl.InvalidArgument, match="resolve_neg"):
        zpccl.TensorInfo.from_torch(tensor, "x")
    zpccl.TensorInfo.from_torch(tensor.resolve_neg(), "x")


def test_tied_weights_may_be_shared() -> None:
    tensor = torch.ones(6)
    infos = [zpccl.TensorInfo.from_torch(tensor, "a"), zpccl.TensorInfo.from_torch(tensor.view(2, 3), "b")]
    assert len(zpccl.SharedState(infos).tensor_infos) == 2


def test_broadcast_gather_and_scatter(pair: Run) -> None:
    """S1: tensors stay tensors, with their dtype; numpy on the other side holds the same bits."""
    import numpy as np

    def work(comm: zpccl.Communicator) -> list[Any]:
        place = pair.comms.index(comm)
        tensor = torch.full((3, 5), float(place + 1), dtype=torch.bfloat16)
        gathered = comm.all_gather(tensor)
        assert gathered.tensor.shape == (2, 3, 5) and gathered.tensor.dtype is torch.bfloat16
        assert (gathered.tensor[gathered.row] == tensor).all()
        recv = torch.zeros(31, dtype=torch.bfloat16)
        again = comm.all_gather(tensor, recv).tensor
        assert again.data_ptr() == recv.data_ptr() and (again == gathered.tensor).all() and recv[30] == 0
        scattered = comm.reduce_scatter(tensor)
        assert scattered.tensor.dtype is torch.bfloat16 and (scattered.tensor == 3).all()
        comm.broadcast(tensor, is_root=place == 1)
        assert (tensor == 2).all()
        mixed = torch.ones(4) if place else np.zeros(4, np.float32)
        comm.broadcast(mixed, is_root=place == 1)
        return [scattered.tensor.numel(), float(mixed[3])]

    assert sorted(pair.all(work)) == [[7, 1.0], [8, 1.0]]


def test_a_new_tensor_is_not_filled() -> None:
    """The thread that answers all calls allocates it; torch.empty would fill it with NaN here."""
    torch.use_deterministic_algorithms(True)
    try:
        tensor, memory = new_tensor(torch.ones(1), (16 * limits.MIB,), DataType.FLOAT)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tensor.numel() == memory.count and not tensor.isnan().any()


def test_one_element_among_two(pair: Run) -> None:
    """One of them gets an empty part."""

    def scatter(comm: zpccl.Communicator) -> list[float]:
        part: list[float] = comm.reduce_scatter(torch.ones(1)).tensor.tolist()
        return part

    assert sorted(pair.all(scatter)) == [[], [2.0]]


def test_parameters_are_gathered_without_a_graph(pair: Run) -> None:
    def gather(comm: zpccl.Communicator) -> bool:
        parameter = torch.nn.Parameter(torch.ones(3))
        comm.broadcast(parameter, is_root=comm is pair.comms[0])
        return bool(comm.all_gather(parameter).tensor.requires_grad)

    assert pair.all(gather) == [False, False]
