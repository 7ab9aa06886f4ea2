"""What the tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_mesh import Mesh, open_until_the_end


@pytest.fixture(scope="module")
def meshes(request: pytest.FixtureRequest) -> Iterator[dict[int, Mesh]]:
    """By number of peers, which are the module's WORLD_SIZES. An odd number of peers have two I/O threads each."""
    sizes = getattr(request.module, "WORLD_SIZES", (2, 3, 5, 8))
    with open_until_the_end({size: Mesh(size, threads=1 + size % 2) for size in sizes}) as made:
        yield made
