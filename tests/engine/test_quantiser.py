"""The quantisation kernels from Python: what docs/quantisation.md says of them, and reduces composed of them."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import numpy as np
import pytest
from engine_mesh import FLOATING, Case, Mesh, open_until_the_end, run, storage, to_bfloat16, to_float64
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_reduces import (
    QUANTISERS,
    decode,
    direct,
    direct_bound,
    encode,
    exact,
    ring,
    ring_bound,
    step_error,
    storing,
)
from quantiser import INSTRUCTION_SETS, Quantiser, instruction_set

from zpccl.engine.engine import EngineError
from zpccl.types import Algorithm, DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

AVAILABLE = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(instruction_set()) + 1]
OPS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN)
INTEGER_OF = {2: np.uint16, 4: np.uint32, 8: np.uint64}

quantisers = st.builds(
    lambda pair, datatype, block: Quantiser(datatype, pair[0], pair[1], block),
    st.sampled_from(QUANTISERS),
    st.sampled_from(FLOATING),
    st.one_of(st.integers(1, 40), st.integers(1, 4096)),
)


@st.composite
def any_bits(draw: st.DrawFn, datatype: DataType) -> np.ndarray:
    """Elements of any bit patterns, many of them special."""
    dtype = storage(datatype)
    integer = INTEGER_OF[dtype.itemsize]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.integers(0, np.iinfo(integer).max, draw(st.integers(1, 600)), integer, endpoint=True)
    for index, value in draw(
        st.lists(st.tuples(st.integers(0, 599), st.integers(0, np.iinfo(integer).max)), max_size=6)
    ):
        bits[index % bits.size] = value
    return bits.view(dtype)


@st.composite
def finite_values(draw: st.DrawFn, datatype: DataType) -> np.ndarray:
    """Finite elements of one scale, from subnormal to huge, with offset, zeros and outliers."""
    info = np.finfo({DataType.BFLOAT16: np.float32}.get(datatype, storage(datatype)))
    reach = int(np.log2(float(info.max))) - 9
    scale = 2.0 ** draw(st.integers({16: -24, 32: -148, 64: -1073}[info.bits], reach))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(draw(st.integers(1, 600))) + draw(st.sampled_from([0.0, 0.0, 3.0, -100.0]))
    values[rng.random(values.size) < draw(st.sampled_from([0, 0.5, 1]))] = 0
    values[0] *= draw(st.sampled_from([1, 1, 100]))
    with np.errstate(over="ignore"):  # Outliers of the largest scale: they are clipped.
        values = np.clip(values * scale, -float(info.max) / 2, float(info.max) / 2)
    return to_bfloat16(values) if datatype is DataType.BFLOAT16 else values.astype(storage(datatype))


@settings(max_examples=300)
@given(st.data())
def test_within_half_a_step(data: st.DataObject) -> None:
    quantiser = data.draw(quantisers)
    elements = data.draw(finite_values(quantiser.datatype))
    values = to_float64(elements, quantiser.datatype)
    back = to_float64(decode(quantiser, encode(quantiser, elements), elements.size), quantiser.datatype)
    bound = step_error(quantiser, values, np.zeros_like(values))
    bound += storing(quantiser, np.abs(values) + bound)
    assert (np.abs(back - values) <= bound).all()
    if quantiser.algorithm is QuantizationAlgorithm.ZERO_POINT_SCALE:
        assert (back[values == 0] == 0).all()


@settings(max_examples=300)
@given(st.data())
def test_blocks_are_finite_or_nan_throughout(data: st.DataObject) -> None:
    """A NaN or an infinity makes its block NaN, of one bit pattern; no other block has one."""
    quantiser = data.draw(quantisers)
    elements = data.draw(any_bits(quantiser.datatype))
    with np.errstate(invalid="ignore"):  # Some NaNs are signalling.
        values = to_float64(elements, quantiser.datatype)
    back = decode(quantiser, encode(quantiser, elements), elements.size)
    read = to_float64(back, quantiser.datatype)
    starts = np.arange(0, values.size, quantiser.block_elements)
    broken = np.logical_or.reduceat(~np.isfinite(values), starts)
    broken = np.repeat(broken, quantiser.block_elements)[: values.size]
    np.testing.assert_array_equal(np.isnan(read), broken)
    assert len({element.tobytes() for element in back[broken]}) <= 1
    if quantiser.datatype in (DataType.FLOAT, DataType.DOUBLE):
        assert np.isfinite(read[~broken]).all()


@settings(max_examples=200)
@given(st.data())
def test_every_instruction_set_and_alignment_gives_the_same_bits(data: st.DataObject) -> None:
    """Of any elements, and of any bytes from the wire."""
    quantiser = data.draw(quantisers)
    quantiser = Quantiser(**{**vars(quantiser), "op": data.draw(st.sampled_from(ReduceOp))})
    elements = data.draw(any_bits(quantiser.datatype))
    size, skew = quantiser.wire_bytes(elements.size), data.draw(st.integers(0, 9))
    foreign = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, 256, size, np.uint8)
    seen = set()
    for name in AVAILABLE:
        kernels = Quantiser(**{**vars(quantiser), "instruction_set": name})
        wire, folded = np.zeros(size + skew, np.uint8)[skew:], np.zeros(size + skew, np.uint8)[skew:]
        shifted = np.zeros(elements.nbytes + skew, np.uint8)[skew:]
        shifted[:] = elements.view(np.uint8)
        kernels.quantise(wire, shifted)
        folded[:] = foreign
        kernels.fold(folded, shifted, 3)
        kernels.dequantise(shifted, foreign)
        seen.add((wire.tobytes(), folded.tobytes(), shifted.tobytes()))
    assert len(seen) == 1


@given(st.data())
def test_constant_blocks(data: st.DataObject) -> None:
    """MIN_MAX: bit for bit, but for the sign of zero. ZERO_POINT_SCALE: within roundings, zeros exactly."""
    quantiser = data.draw(quantisers)
    element = data.draw(any_bits(quantiser.datatype))[:1]
    elements = np.repeat(element, data.draw(st.integers(1, 300)))
    with np.errstate(invalid="ignore"):  # Some NaNs are signalling.
        values = to_float64(elements, quantiser.datatype)
    back = decode(quantiser, encode(quantiser, elements), elements.size)
    if not np.isfinite(values[0]):
        assert np.isnan(to_float64(back, quantiser.datatype)).all()
    elif quantiser.algorithm is QuantizationAlgorithm.MIN_MAX or values[0] == 0:
        assert (to_float64(back, quantiser.datatype) == values).all()
        assert values[0] == 0 or back.tobytes() == elements.tobytes()


@settings(max_examples=150)
@given(
    pair=st.sampled_from(QUANTISERS),
    datatype=st.sampled_from(FLOATING),
    op=st.sampled_from(OPS),
    block=st.integers(1, 300),
    size=st.integers(2, 24),
    seed=st.integers(0, 2**32),
)
@pytest.mark.slow
def test_bounds_by_world_size(
    pair: tuple[QuantizationAlgorithm, QuantizedDataType],
    datatype: DataType,
    op: ReduceOp,
    block: int,
    size: int,
    seed: int,
) -> None:
    """Ring: N quantisations, of growing partial results. Direct exchange: two, whatever N is."""
    quantiser = Quantiser(datatype, *pair, block, op)
    inputs = _inputs(datatype, size, 40 * size + 7, seed)
    truth = exact(op, inputs, datatype)
    for reduce, bound in ((ring, ring_bound), (direct, direct_bound)):
        off = np.abs(to_float64(reduce(quantiser, inputs), datatype) - truth)
        assert (off <= bound(quantiser, inputs)).all(), (reduce.__name__, off.max(), bound(quantiser, inputs).max())


def _inputs(datatype: DataType, size: int, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((size, count)) * rng.uniform(0.1, 10, (size, 1)) + rng.uniform(-3, 3, (size, 1))
    if datatype is DataType.BFLOAT16:
        return [to_bfloat16(v) for v in values]
    return [v.astype(storage(datatype)) for v in values]


@pytest.mark.parametrize("pair", QUANTISERS)
def test_direct_beats_the_ring_from_four_peers_on(pair: tuple[QuantizationAlgorithm, QuantizedDataType]) -> None:
    """Two quantisations of each element do less harm than N; the bounds say so, and so do the results."""
    quantiser = Quantiser(DataType.FLOAT, *pair)
    truth_of, worst = {}, {}
    for size in (4, 8, 16, 32):
        inputs = _inputs(DataType.FLOAT, size, 256 * size, size)
        truth_of[size] = exact(ReduceOp.SUM, inputs, DataType.FLOAT)
        for reduce, bound in ((ring, ring_bound), (direct, direct_bound)):
            result = reduce(quantiser, inputs)
            worst[reduce, size] = np.abs(result - truth_of[size]).max()
            worst[bound, size] = bound(quantiser, inputs).max()
        assert worst[direct, size] < worst[ring, size]
        assert worst[direct_bound, size] < worst[ring_bound, size]
    assert worst[ring_bound, 32] / worst[ring_bound, 4] > 2 * worst[direct_bound, 32] / worst[direct_bound, 4]


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[int, Mesh]]:
    with open_until_the_end({size: Mesh(size) for size in (2, 3, 5)}) as made:
        yield made


@pytest.mark.parametrize("datatype", FLOATING)
@pytest.mark.parametrize("pair", QUANTISERS)
def test_the_engine_composes_them_so(
    meshes: dict[int, Mesh], pair: tuple[QuantizationAlgorithm, QuantizedDataType], datatype: DataType
) -> None:
    """Ring and direct exchange of the engine give what the kernels give by hand, bit for bit, so its bounds."""
    algorithm, quantized = pair
    for size, mesh in meshes.items():
        for op in OPS:
            inputs = _inputs(datatype, size, 3001, size)
            for way, reduce in ((Algorithm.RING, ring), (Algorithm.DIRECT, direct)):
                case = Case(datatype, op, algorithm, 33, 900, algorithm=way, quantized=quantized)
                expected = reduce(Quantiser(datatype, algorithm, quantized, 33, op), inputs)
                assert run(mesh, case, inputs)[0].tobytes() == expected.tobytes(), (size, op, way)


def test_arguments_are_checked() -> None:
    good = Quantiser(DataType.FLOAT, QuantizationAlgorithm.MIN_MAX)
    elements, wire = np.zeros(10, np.float32), np.zeros(18, np.uint8)
    good.quantise(wire, elements)
    with pytest.raises(ValueError, match="17 bytes are too few for 10 elements"):
        good.quantise(wire[:17], elements)
    for bad in (
        Quantiser(DataType.INT32, QuantizationAlgorithm.MIN_MAX),
        Quantiser(DataType.FLOAT, QuantizationAlgorithm.NONE),
        Quantiser(DataType.FLOAT, QuantizationAlgorithm.MIN_MAX, block_elements=0),
        Quantiser(DataType.FLOAT, QuantizationAlgorithm.MIN_MAX, block_elements=4097),
    ):
        with pytest.raises(EngineError) as caught:
            bad.wire_bytes(10)
        assert caught.value.errno == errno.EINVAL
