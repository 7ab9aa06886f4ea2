"""Encrypted links with the ciphers that a run uses. test_record.c tests data that an attacker changes on the way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import select
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from engine_mesh import (
    WAIT_S,
    Case,
    Mesh,
    cipher_ends,
    make_plan,
    open_until_the_end,
    peer_id,
    random_inputs,
    run,
    socket_pair,
    until,
    wait_done,
)
from reference_results import check_result

from zpccl.engine.ciphers import Cipher, CipherKeys, available
from zpccl.engine.engine import Engine, EngineError, LinkLost
from zpccl.types import Algorithm, QuantizationAlgorithm


class MixedMesh(Mesh):
    """Only links between ranks of which one is odd and one is even are encrypted."""

    def link(self, a: int, b: int, ends: Sequence[tuple[socket.socket, socket.socket]], cipher: Cipher | None) -> None:
        super().link(a, b, ends, cipher if (a + b) % 2 == 1 else None)


@pytest.fixture(scope="module")
def meshes() -> Iterator[dict[tuple[Cipher, int, bool], Mesh]]:
    made = {}
    for cipher, (size, mixed) in itertools.product(available(), [(2, False), (3, False), (3, True)]):
        made[cipher, size, mixed] = (MixedMesh if mixed else Mesh)(size, threads=1 + size % 2, cipher=cipher)
    with open_until_the_end(made):
        yield made


@pytest.mark.parametrize("algorithm", [Algorithm.RING, Algorithm.DIRECT])
@pytest.mark.parametrize("quantization", [QuantizationAlgorithm.NONE, QuantizationAlgorithm.MIN_MAX])
@pytest.mark.parametrize("cipher", available())
def test_results(
    meshes: dict[tuple[Cipher, int, bool], Mesh],
    cipher: Cipher,
    quantization: QuantizationAlgorithm,
    algorithm: Algorithm,
) -> None:
    """S1: frames smaller and larger than a record, and encrypted links beside plain ones."""
    rng = np.random.default_rng(int(cipher))
    sizes = [(2, False), (3, False), (3, True)]
    for (size, mixed), in_place, frame_bytes in itertools.product(sizes, (False, True), (96, 1 << 16)):
        case = Case(quantization=quantization, frame_bytes=frame_bytes, in_place=in_place, algorithm=algorithm)
        count = 60_001 if frame_bytes > 96 else 4099
        inputs = random_inputs(rng, case, count, size)
        for result in run(meshes[cipher, size, mixed], case, inputs):
            check_result(case, inputs, result)


@pytest.mark.parametrize("cipher", available())
def test_results_of_one_hop(meshes: dict[tuple[Cipher, int, bool], Mesh], cipher: Cipher) -> None:
    rng = np.random.default_rng(int(cipher))
    for (size, mixed), in_place in itertools.product([(2, False), (3, False), (3, True)], (False, True)):
        case = Case(frame_bytes=4096, in_place=in_place, algorithm=Algorithm.ONE_SHOT)
        inputs = random_inputs(rng, case, 4099, size)
        for result in run(meshes[cipher, size, mixed], case, inputs):
            check_result(case, inputs, result)


@pytest.mark.parametrize("cipher", available())
def test_a_half_written_frame_is_finished_after_its_attempt(cipher: Cipher) -> None:
    """S2, S4: the other end could not open a record that lacks its end, nor any later record."""
    case = Case(frame_bytes=1 << 20)
    pair = socket_pair(1 << 14)
    with Engine() as one, Engine() as other:
        for engine, end, keys, peer in zip((one, other), pair, cipher_ends(cipher), (1, 0), strict=True):
            engine.open_link(peer_id(peer), [end.detach()], [keys])
        source = np.ones(1 << 20, np.float32)
        target = np.empty_like(source)
        one.start_reduce(make_plan(case, 1, 0, 2, source, target))
        until(lambda: sum(one.link_state(peer_id(1)).tx_bytes) > 0)
        one.end_reduce(1, commit=False)
        source[:] = 3.0  # It belongs to the caller again.
        results = [np.empty_like(source) for _ in range(2)]
        for rank, engine in enumerate((one, other)):
            engine.start_reduce(make_plan(case, 2, rank, 2, source, results[rank]))
        assert [wait_done(engine).status for engine in (one, other)] == [0, 0]
        for engine, result in zip((one, other), results, strict=True):
            engine.end_reduce(2, commit=True)
            assert (result == 6.0).all()


OTHERS = {
    "other keys": cipher_ends(max(available()), 1)[1],
    "the same direction": cipher_ends(max(available()))[0],
    "another cipher": cipher_ends(min(available()))[1],
    "no keys": None,
}


@pytest.mark.parametrize("what", OTHERS)
def test_ends_that_do_not_match_move_nothing(what: str) -> None:
    """S2, S7: the buffers stay as they were."""
    if what == "another cipher" and len(available()) == 1:
        pytest.skip("without instructions for AES there is one cipher")
    pair, cipher_keys = socket_pair(), (cipher_ends(max(available()))[0], OTHERS[what])
    statuses: list[int] = []
    with Engine() as one, Engine() as other:
        for engine, end, keys, peer in zip((one, other), pair, cipher_keys, (1, 0), strict=True):
            engine.open_link(peer_id(peer), [end.detach()], [keys] if keys else None)
        buffers = [np.full(100_000, rank + 1, np.float32) for rank in range(2)]
        for rank, engine in enumerate((one, other)):
            with contextlib.suppress(EngineError):  # The first message may have ended the link already.
                engine.start_reduce(make_plan(Case(in_place=True), 1, rank, 2, buffers[rank], buffers[rank]))
        for rank, engine in enumerate((one, other)):
            while len(statuses) == rank:
                assert select.select([engine.fileno()], [], [], WAIT_S)[0], "the link is not lost"
                statuses += [event.status for event in engine.poll() if isinstance(event, LinkLost)]
            engine.end_reduce(1, commit=False)
            assert (buffers[rank] == rank + 1).all()
    assert len(statuses) == 2 and {-errno.EBADMSG, -errno.EPROTO} & set(statuses)


def test_keys_of_another_size_are_refused() -> None:
    near, far = socket_pair()
    with Engine() as engine, near, far:
        for size in (8, 64):
            with pytest.raises(ValueError, match="key"):
                engine.open_link(peer_id(1), [near.fileno()], [CipherKeys(max(available()), bytes(size), bytes(size))])
        with pytest.raises(ValueError, match="1 sockets and 2 cipher keys"):
            engine.open_link(peer_id(1), [near.fileno()], list(cipher_ends(max(available()))))
