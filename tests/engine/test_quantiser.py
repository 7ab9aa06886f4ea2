"""Reduces composed from the quantisation kernels: the bounds of docs/quantisation.md.

test_quantise.c and test_join.c test the kernels themselves, test_engine.py that the engine composes them so.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_mesh import FLOATING, storage, to_bfloat16, to_float64
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_reduces import QUANTISERS, direct, direct_bound, exact, ring, ring_bound, trees, trees_bound
from quantiser import Quantiser
from tree_lanes import any_lanes, count_of

from zpccl.engine.engine import TreeLane
from zpccl.types import DataType, QuantizationAlgorithm, QuantizedDataType, ReduceOp

any_quantiser = st.builds(
    lambda pair, datatype, block, op: Quantiser(datatype, pair[0], pair[1], block, op),
    st.sampled_from(QUANTISERS),
    st.sampled_from(FLOATING),
    st.integers(1, 300),
    st.sampled_from([ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN]),
)


@settings(max_examples=150)
@given(any_quantiser, st.integers(2, 24), st.integers(0, 2**32))
@pytest.mark.slow
def test_bounds_by_world_size(quantiser: Quantiser, size: int, seed: int) -> None:
    """Ring: N quantisations, of growing partial results. Direct exchange: two, for any N."""
    inputs = _inputs(quantiser.datatype, size, 40 * size + 7, seed)
    truth = exact(quantiser.op, inputs, quantiser.datatype)
    for reduce, bound in ((ring, ring_bound), (direct, direct_bound)):
        off = np.abs(to_float64(reduce(quantiser, inputs), quantiser.datatype) - truth)
        assert (off <= bound(quantiser, inputs)).all(), (reduce.__name__, off.max(), bound(quantiser, inputs).max())


def _inputs(datatype: DataType, size: int, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((size, count)) * rng.uniform(0.1, 10, (size, 1)) + rng.uniform(-3, 3, (size, 1))
    if datatype is DataType.BFLOAT16:
        return [to_bfloat16(v) for v in values]
    return [v.astype(storage(datatype)) for v in values]


@settings(max_examples=100)
@given(any_quantiser, st.integers(2, 16).flatmap(lambda size: any_lanes(size, 500)), st.integers(0, 2**32))
@pytest.mark.slow
def test_bounds_of_trees(quantiser: Quantiser, lanes: tuple[TreeLane, ...], seed: int) -> None:
    """Each rank quantises once what it sends up, whatever the form of the tree; the result is quantised once more."""
    datatype = quantiser.datatype
    inputs = _inputs(datatype, len(lanes[0].parents), count_of(lanes), seed)
    off = np.abs(to_float64(trees(quantiser, inputs, lanes), datatype) - exact(quantiser.op, inputs, datatype))
    assert (off <= trees_bound(quantiser, inputs, lanes)).all()


@pytest.mark.parametrize("pair", QUANTISERS)
def test_direct_beats_the_ring_from_four_peers_on(pair: tuple[QuantizationAlgorithm, QuantizedDataType]) -> None:
    """Two quantisations of each element do less harm than N. Both the bounds and the results show so."""
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
