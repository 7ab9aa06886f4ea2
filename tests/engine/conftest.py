"""Fixtures that tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from engine_mesh import HandMadePeer, Mesh, Three, open_until_the_end


@pytest.fixture(scope="module")
def meshes(request: pytest.FixtureRequest) -> Iterator[dict[int, Mesh]]:
    """Meshes by number of peers, for the module's WORLD_SIZES. If the number is odd, peers have two I/O threads."""
    sizes = getattr(request.module, "WORLD_SIZES", (2, 3, 5, 8))
    with open_until_the_end({size: Mesh(size, threads=1 + size % 2) for size in sizes}) as made:
        yield made


@pytest.fixture
def peer() -> Iterator[HandMadePeer]:
    with closing(HandMadePeer()) as made:
        yield made


@pytest.fixture
def three() -> Iterator[Three]:
    with closing(Three()) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[Mesh]:
    """Two engines, linked by one connection."""
    with closing(Mesh(2, connections=1)) as made:
        yield made
