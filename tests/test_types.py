"""The plain values of the public API: names and numbers are those of PCCL."""

from __future__ import annotations

import subprocess
import sys
from enum import Enum

import numpy as np
import pytest

from zpccl.errors import InvalidArgument
from zpccl.limits import QUANTIZATION_BLOCK_ELEMENTS
from zpccl.types import (
    Attribute,
    DataType,
    DeviceType,
    DigestKind,
    DistributionHint,
    QuantizationAlgorithm,
    QuantizationOptions,
    QuantizedDataType,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    SharedStateSyncStrategy,
)


@pytest.mark.parametrize(
    "kind, names",
    [
        (ReduceOp, "SUM AVG PROD MAX MIN"),
        (Attribute, "GLOBAL_WORLD_SIZE LOCAL_WORLD_SIZE NUM_DISTINCT_PEER_GROUPS LARGEST_PEER_GROUP_WORLD_SIZE"),
        (SharedStateSyncStrategy, "ENFORCE_POPULAR RECEIVE_ONLY SEND_ONLY"),
        (DataType, "UINT8 INT8 UINT16 INT16 UINT32 INT32 UINT64 INT64 FLOAT16 BFLOAT16 FLOAT DOUBLE"),
        (DeviceType, "CPU CUDA"),
        (DistributionHint, "NONE NORMAL UNIFORM"),
        (QuantizationAlgorithm, "NONE MIN_MAX ZERO_POINT_SCALE"),
    ],
)
def test_names_and_numbers(kind: type[Enum], names: str) -> None:
    """They go over the wire: a change needs a new PROTOCOL_VERSION."""
    assert [(member.name, member.value) for member in kind] == [(n, i) for i, n in enumerate(names.split())]


def test_quantised_types() -> None:
    """Quantised types that are element types have the same numbers, so either may be given; no other number repeats."""
    assert {q.name: (q.value, q.bits) for q in QuantizedDataType} == {
        "UINT8": (DataType.UINT8, 8),
        "INT8": (DataType.INT8, 8),
        "UINT4": (12, 4),
        "INT4": (13, 4),
    }
    assert {12, 13}.isdisjoint(DataType)
    assert QuantizationOptions(DataType.INT8) == QuantizationOptions(QuantizedDataType.INT8)


@pytest.mark.parametrize("datatype", [d for d in DataType if d is not DataType.BFLOAT16], ids=lambda d: d.name)
def test_numpy_there_and_back(datatype: DataType) -> None:
    dtype = datatype.to_numpy_dtype()
    assert DataType.from_numpy_dtype(dtype) is datatype
    assert DataType.from_numpy_dtype(dtype.name) is datatype
    assert dtype.itemsize == datatype.itemsize
    assert (dtype.kind == "f") is datatype.is_floating


def test_bfloat16_is_not_numpys() -> None:
    assert (DataType.BFLOAT16.itemsize, DataType.BFLOAT16.is_floating) == (2, True)
    with pytest.raises(InvalidArgument, match="use torch, ml_dtypes, or uint16"):
        DataType.BFLOAT16.to_numpy_dtype()


@pytest.mark.parametrize(
    "dtype",
    [
        "complex64",
        "bool",
        "U4",
        "O",
        "datetime64[s]",
        ">f4",
        ">i8",
        np.dtype("f4,i4"),
        "?!",
        ",",
        "f4(",
        [("a", "f4"), ("a", "f4")],
        5,
    ],
)
def test_other_numpy_dtypes_are_refused(dtype: object) -> None:
    with pytest.raises(InvalidArgument, match=r"supported are uint8, .*, float64"):
        DataType.from_numpy_dtype(dtype)


def test_torch_dtypes_are_known_by_name() -> None:
    """This works without torch: its dtypes print as "torch.float32"."""
    assert DataType.from_torch_dtype("torch.bfloat16") is DataType.BFLOAT16
    with pytest.raises(InvalidArgument, match="complex64 is not supported"):
        DataType.from_torch_dtype("torch.complex64")


@pytest.mark.torch
def test_torch_there_and_back() -> None:
    import torch

    for datatype in DataType:
        dtype = datatype.to_torch_dtype()
        assert DataType.from_torch_dtype(dtype) is datatype
        assert torch.empty(1, dtype=dtype).element_size() == datatype.itemsize


def test_device_types() -> None:
    assert DeviceType.from_torch_device_type("cpu") is DeviceType.CPU
    assert DeviceType.from_torch_device_type("cuda") is DeviceType.CUDA
    with pytest.raises(InvalidArgument, match="'mps' is not supported; use cpu or cuda"):
        DeviceType.from_torch_device_type("mps")
    with pytest.raises(InvalidArgument, match="not supported"):
        DeviceType.from_torch_device_type(["cpu"])  # type: ignore[arg-type]


def test_defaults_are_those_of_pccl() -> None:
    operand = ReduceOperandDescriptor(DataType.FLOAT)
    assert operand == ReduceOperandDescriptor(datatype=DataType.FLOAT, distribution_hint=DistributionHint.NONE)
    assert QuantizationOptions() == QuantizationOptions(
        quantized_datatype=DataType.UINT8,
        algorithm=QuantizationAlgorithm.MIN_MAX,
        block_size=QUANTIZATION_BLOCK_ELEMENTS,
    )
    descriptor = ReduceDescriptor(count=4, op=ReduceOp.SUM, tag=1, operand_descriptor=operand)
    assert descriptor.quantization_options.algorithm is QuantizationAlgorithm.NONE


def test_descriptors_can_be_changed_as_those_of_pccl() -> None:
    one, other = (ReduceDescriptor(4, ReduceOp.SUM, 1, ReduceOperandDescriptor(DataType.FLOAT)) for _ in range(2))
    one.tag += 1
    one.operand_descriptor.datatype = DataType.DOUBLE
    one.quantization_options.algorithm = QuantizationAlgorithm.MIN_MAX
    operation = ReduceOpDescriptor.from_numpy(np.zeros(4), np.zeros(4), one)
    operation.reduce_descriptor = other
    assert other == ReduceDescriptor(4, ReduceOp.SUM, 1, ReduceOperandDescriptor(DataType.FLOAT)) != one


def test_importing_costs_nothing() -> None:
    """A conversion looks numpy and torch up when called. The module runs alone, as the package itself uses them."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('zpccl'); package.__path__ = [sys.argv[1]]; sys.modules['zpccl'] = package\n"
        "import zpccl.types\n"
        "print([name for name in ('numpy', 'torch') if name in sys.modules])\n"
    )
    import zpccl.types

    folder = zpccl.types.__file__.rpartition("/")[0]
    found = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def test_kinds_of_digests_have_names() -> None:
    assert [DigestKind.parse(name) for name in ("blake3", "xxh3", DigestKind.XXH3)] == [0, 1, 1]
    for wrong in ("BLAKE3", "md5", "", 0, None, ["xxh3"]):
        with pytest.raises(InvalidArgument, match="neither 'blake3' nor 'xxh3'"):
            DigestKind.parse(wrong)  # type: ignore[arg-type]
