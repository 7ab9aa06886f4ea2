"""Torch CPU tensors in place of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from e2e.local import Run, local_run

import zpccl
from zpccl.types import DataType, QuantizationOptions, ReduceOp

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.torch, pytest.mark.e2e]


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
    """S1: bit for bit the same on both."""

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
    "bool": lambda: torch.ones(4, dtype=torch.bool),
    "complex": lambda: torch.ones(4, dtype=torch.complex64),
    "empty": lambda: torch.ones(0),
    "expanded": lambda: torch.ones(1).expand(4),
}


@pytest.mark.parametrize("what", BAD)
def test_tensors_that_cannot_be_used_are_refused(pair: Run, what: str) -> None:
    with pytest.raises(zpccl.InvalidArgument):
        pair.comms[0].all_reduce(BAD[what]())
    with pytest.raises(zpccl.InvalidArgument):
        zpccl.TensorInfo.from_torch(BAD[what](), "x")


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """Says that it is on a GPU; this machine need not have one."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")


def test_a_tensor_on_a_gpu_is_refused_with_what_to_do(pair: Run) -> None:
    tensor = torch.ones(4).as_subclass(OnGpu)
    with pytest.raises(zpccl.InvalidArgument, match=r"cuda:0.*tensor\.cpu\(\)"):
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


def test_kinds_must_not_be_mixed_up() -> None:
    import numpy as np

    with pytest.raises(zpccl.InvalidArgument, match="from_torch"):
        zpccl.TensorInfo.from_numpy(torch.ones(3), "x")
    with pytest.raises(zpccl.InvalidArgument, match="not a torch tensor"):
        zpccl.TensorInfo.from_torch(np.ones(3), "x")


def test_tied_weights_may_be_shared() -> None:
    tensor = torch.ones(6)
    infos = [zpccl.TensorInfo.from_torch(tensor, "a"), zpccl.TensorInfo.from_torch(tensor.view(2, 3), "b")]
    assert len(zpccl.SharedState(infos).tensor_infos) == 2
