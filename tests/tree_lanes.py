"""Lanes of trees: some fixed ones, arbitrary ones, and the result of an all-reduce over them, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from engine_mesh import Case, storage, to_bfloat16, to_float64
from hypothesis import strategies as st

from zpccl.engine.engine import TreeLane
from zpccl.types import CollectiveKind, DataType, ReduceOp

Parents = tuple[int, ...]


def star(size: int, root: int) -> Parents:
    return (root,) * size


def chain(ranks: Sequence[int]) -> Parents:
    """A chain: the first rank is the root, and each rank is the parent of the next."""
    parents = [0] * len(ranks)
    for rank, parent in zip(ranks, (ranks[0], *ranks), strict=False):
        parents[rank] = parent
    return tuple(parents)


def binary(ranks: Sequence[int]) -> Parents:
    """A binary heap of these ranks."""
    parents = [0] * len(ranks)
    for i, rank in enumerate(ranks):
        parents[rank] = ranks[max(i - 1, 0) // 2]
    return tuple(parents)


def cut(count: int, trees: Sequence[Parents], weights: Sequence[int]) -> tuple[TreeLane, ...]:
    """Lanes of `count` elements, by weight; the last lane gets the remainder."""
    elements = [count * weight // sum(weights) for weight in weights]
    elements[-1] = count - sum(elements[:-1])
    return tuple(map(TreeLane, elements, trees))


def stars(size: int, count: int) -> tuple[TreeLane, ...]:
    """The stars of the direct exchange."""
    return tuple(TreeLane(count // size + (rank < count % size), star(size, rank)) for rank in range(size))


def mixed(size: int, count: int) -> tuple[TreeLane, ...]:
    """One lane of each form, with any length and several roots; one lane is empty."""
    ranks = range(size)
    trees = (chain(ranks), star(size, size - 1), binary(ranks[::-1]), star(size, 0), chain((*ranks[1:], 0)))
    return cut(count, trees, (3, 2, 0, 1, 4))


def lanes_of_owners(
    rng: np.random.Generator, kind: CollectiveKind, size: int, count: int, owners: Sequence[int], *, stars_only: bool
) -> tuple[TreeLane, ...]:
    """Lanes of a collective other than an all-reduce: its owners are the roots."""
    lengths = [count // size + (part < count % size) for part in range(size)]
    if kind is CollectiveKind.ALL_GATHER:
        lengths = [count] * size
    elif kind is CollectiveKind.BROADCAST:
        owners, lengths = (*owners, *owners), [count // 3, count - count // 3]
    trees = []
    for root in owners:
        order = [root, *(rank for rank in rng.permutation(size).tolist() if rank != root)]
        parents = [root] * size
        for i, rank in enumerate(order[1:], start=1):
            parents[rank] = root if stars_only else order[rng.integers(i)]
        trees.append(tuple(parents))
    return tuple(map(TreeLane, lengths, trees))


@st.composite
def any_tree(draw: st.DrawFn, size: int) -> Parents:
    order = draw(st.permutations(range(size)))
    parents = [order[0]] * size
    for i in range(1, size):
        parents[order[i]] = order[draw(st.integers(0, i - 1))]
    return tuple(parents)


@st.composite
def any_lanes(
    draw: st.DrawFn, size: int, elements_max: int = 2000, *, stars_only: bool = False
) -> tuple[TreeLane, ...]:
    """One or more lanes, with one or more elements in all."""
    trees = st.builds(star, st.just(size), st.integers(0, size - 1)) if stars_only else any_tree(size)
    lanes = draw(st.lists(st.builds(TreeLane, st.integers(0, elements_max), trees), min_size=1, max_size=5))
    return lanes_or_one(lanes)


def lanes_or_one(lanes: Sequence[TreeLane]) -> tuple[TreeLane, ...]:
    return tuple(lanes) if any(lane.elements for lane in lanes) else (TreeLane(1, lanes[0].parents), *lanes[1:])


def count_of(lanes: Sequence[TreeLane]) -> int:
    return sum(lane.elements for lane in lanes)


def parts(lanes: Sequence[TreeLane], inputs: Sequence[np.ndarray]) -> Iterator[tuple[Parents, list[np.ndarray]]]:
    """The trees of lanes that are not empty, each with its part of all inputs."""
    start = 0
    for lane in lanes:
        end = start + lane.elements
        if lane.elements:
            yield lane.parents, [x[start:end] for x in inputs]
        start = end


def root_of(parents: Parents) -> int:
    return next(rank for rank, parent in enumerate(parents) if rank == parent)


def family(parents: Parents, rank: int) -> list[int]:
    """A rank and its children, in the order in which their shares are reduced."""
    return [other for other, parent in enumerate(parents) if rank in (other, parent)]


def expected(case: Case, lanes: Sequence[TreeLane], inputs: Sequence[np.ndarray]) -> np.ndarray:
    """The result of a reduce without quantisation."""
    pieces = []
    for parents, shares in parts(lanes, inputs):
        share, _ = _share(case, parents, shares, root_of(parents))
        pieces.append(share)
    return np.concatenate(pieces)


_FUNCTIONS = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
}


def _share(case: Case, parents: Parents, inputs: Sequence[np.ndarray], rank: int) -> tuple[np.ndarray, int]:
    """A rank's result from its input and its children's shares, and the number of inputs in it."""
    if family(parents, rank) == [rank]:
        return inputs[rank], 1
    shares = [(inputs[r], 1) if r == rank else _share(case, parents, inputs, r) for r in family(parents, rank)]
    count = sum(n for _, n in shares)
    divisor = len(inputs) if case.op is ReduceOp.AVG and rank == parents[rank] else 1
    if case.datatype in (DataType.FLOAT16, DataType.BFLOAT16):
        return _join_16_bits(case, shares, count), count
    wide = np.dtype(np.int64) if divisor > 1 and inputs[0].dtype.kind in "iu" and inputs[0].itemsize < 8 else None
    values = [x if wide is None else x.astype(wide) for x, _ in shares]
    total = values[0]
    for x in values[1:]:
        total = _FUNCTIONS[case.op](total, x)
    if divisor > 1 and total.dtype.kind in "iu":
        total = (total - np.fmod(total, total.dtype.type(divisor))) // total.dtype.type(divisor)
    elif divisor > 1:
        total = total / total.dtype.type(divisor)
    return total.astype(storage(case.datatype)), count


def _join_16_bits(case: Case, shares: Sequence[tuple[np.ndarray, int]], count: int) -> np.ndarray:
    """In float32, rounded once. An AVG makes means; each counts as often as it has inputs."""
    averages = case.op is ReduceOp.AVG
    wide = [to_float64(x, case.datatype).astype(np.float32) * np.float32(n if averages else 1) for x, n in shares]
    total = wide[0]
    for x in wide[1:]:
        total = _FUNCTIONS[case.op](total, x)
    total = total / np.float32(count) if averages else total
    return to_bfloat16(total) if case.datatype is DataType.BFLOAT16 else total.astype(np.float16)
