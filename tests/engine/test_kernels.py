"""The kernels through the engine, where numpy can say what the bits must be: two peers, so one operation an element."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engine_mesh import FLOATING, Case, Mesh, run, storage, to_bfloat16, to_float64

from zpccl.types import DataType, QuantizationAlgorithm, ReduceOp

INTEGERS = tuple(datatype for datatype in DataType if datatype not in FLOATING)


@pytest.fixture(scope="module")
def pair() -> Iterator[Mesh]:
    mesh = Mesh(2)
    yield mesh
    mesh.close()


def both(datatype: DataType, values: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Every ordered pair of `values`, as two arrays of the type."""
    first, second = np.array(np.meshgrid(values, values)).reshape(2, -1)
    return convert(first, datatype), convert(second, datatype)


def convert(values: np.ndarray, datatype: DataType) -> np.ndarray:
    """Doubles, NaN included, in the type."""
    if datatype is DataType.BFLOAT16:
        return np.where(np.isnan(values), np.uint16(0x7FC0), to_bfloat16(values))
    return values.astype(storage(datatype))


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integers_wrap_and_divide_toward_zero(pair: Mesh, datatype: DataType) -> None:
    info = np.iinfo(storage(datatype))
    a, b = (np.array(v, info.dtype) for v in zip(*[(x, y) for x in _edges(info) for y in _edges(info)], strict=True))
    exact = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]

    def wrap(value: int) -> int:
        return (value - info.min) % (info.max - info.min + 1) + info.min

    def halve(value: int) -> int:
        return -(-value // 2) if value < 0 else value // 2

    expected = {
        ReduceOp.SUM: [wrap(x + y) for x, y in exact],
        ReduceOp.AVG: [halve(wrap(x + y)) for x, y in exact],
        ReduceOp.PROD: [wrap(x * y) for x, y in exact],
        ReduceOp.MAX: [max(x, y) for x, y in exact],
        ReduceOp.MIN: [min(x, y) for x, y in exact],
    }
    for op in ReduceOp:
        assert run(pair, Case(datatype, op), [a, b])[0].tolist() == expected[op], op


def _edges(info: np.iinfo) -> list[int]:
    return sorted(
        {info.min, info.min + 1, -3 if info.min else 3, -1 if info.min else 1, 0, 1, 2, 7, info.max - 1, info.max}
    )


@pytest.mark.parametrize("datatype", FLOATING)
def test_nan_and_infinity_propagate(pair: Mesh, datatype: DataType) -> None:
    a, b = both(datatype, [0.0, 1.0, -2.5, np.inf, -np.inf, np.nan])
    x, y = to_float64(a, datatype), to_float64(b, datatype)
    with np.errstate(invalid="ignore"):
        expected = {
            ReduceOp.SUM: x + y,
            ReduceOp.AVG: (x + y) / 2,
            ReduceOp.PROD: x * y,
            ReduceOp.MAX: np.maximum(x, y),
            ReduceOp.MIN: np.minimum(x, y),
        }
    for op in ReduceOp:
        for in_place in (False, True):
            result = run(pair, Case(datatype, op, in_place=in_place), [a, b])[0]
            np.testing.assert_array_equal(to_float64(result, datatype), expected[op], err_msg=str(op))


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.PROD])
@pytest.mark.parametrize("datatype", [DataType.FLOAT16, DataType.FLOAT, DataType.DOUBLE])
def test_rounding_is_to_nearest_even_bit_for_bit(pair: Mesh, datatype: DataType, op: ReduceOp) -> None:
    """All exponents, subnormals and overflow to infinity. numpy computes halves in float, too."""
    rng = np.random.default_rng(datatype)
    dtype = storage(datatype)
    raw = [rng.integers(0, 256, 40_000 * dtype.itemsize, np.uint8).view(dtype) for _ in range(2)]
    a, b = (np.where(np.isnan(values), dtype.type(1), values) for values in raw)
    with np.errstate(all="ignore"):
        expected = a + b if op is ReduceOp.SUM else a * b
    result = run(pair, Case(datatype, op), [a, b])[0]
    ordinary = ~np.isnan(expected)
    assert np.isnan(result[~ordinary]).all()
    assert result[ordinary].tobytes() == expected[ordinary].tobytes()


def test_bfloat16_rounds_to_nearest_even_bit_for_bit(pair: Mesh) -> None:
    rng = np.random.default_rng(0)
    a, b = (to_bfloat16((rng.standard_normal(40_000) * 10.0 ** rng.integers(-30, 30)).astype(np.float32)) for _ in "ab")
    total = (to_float64(a, DataType.BFLOAT16) + to_float64(b, DataType.BFLOAT16)).astype(np.float32)
    assert run(pair, Case(DataType.BFLOAT16), [a, b])[0].tobytes() == to_bfloat16(total).tobytes()


@pytest.mark.parametrize("algorithm", [QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE])
@pytest.mark.parametrize("datatype", FLOATING)
def test_quantised_specials(pair: Mesh, datatype: DataType, algorithm: QuantizationAlgorithm) -> None:
    """A block that is not finite on any peer becomes NaN everywhere; the others are untouched by it."""
    case = Case(datatype, ReduceOp.SUM, algorithm, block_elements=64, frame_bytes=64 * 8)
    values = np.ones((2, 1024))
    values[0, 70], values[1, 300], values[0, 600:700] = np.nan, np.inf, 0
    values[1, 600:700] = 0
    result = to_float64(run(pair, case, [convert(v, datatype) for v in values])[0], datatype)
    broken = np.zeros(1024, bool)
    broken[64:128] = broken[256:320] = True
    np.testing.assert_array_equal(np.isnan(result), broken)
    expected = values.sum(axis=0)
    assert np.abs(result - expected)[~broken].max() <= 2.0 / 255 * 2
    assert (result[640:700] == 0).all()


@pytest.mark.parametrize("algorithm", [QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE])
@pytest.mark.parametrize("datatype", [DataType.FLOAT, DataType.DOUBLE])
@pytest.mark.parametrize("end", ["largest", "smallest"])
def test_quantised_extremes(pair: Mesh, datatype: DataType, algorithm: QuantizationAlgorithm, end: str) -> None:
    """Blocks whose range overflows, and blocks of subnormals: finite, and within a step."""
    info = np.finfo(storage(datatype))
    reach = info.max if end == "largest" else info.smallest_subnormal * 10_000
    a = np.linspace(-1, 1, 256).astype(info.dtype) * reach
    result = run(pair, Case(datatype, ReduceOp.MAX, algorithm, block_elements=256), [a, a])[0]
    assert np.isfinite(result).all()
    assert np.abs(result / 4 - a / 4).max() <= reach / 255 * 1.5 + 512 * info.smallest_subnormal
