"""Checkpoints: a load restores exactly what was saved, and a failure changes nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import signal
import stat
import tracemalloc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from interpreter import limited

import zpccl
from zpccl import limits
from zpccl.engine.tensors import view
from zpccl.state import checkpoint
from zpccl.state.regions import HostRegion, Region, region

Arrays = dict[str, "np.ndarray[Any, Any]"]


def state_of(arrays: Arrays, revision: int = 0) -> zpccl.SharedState:
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, name) for name, array in arrays.items()])
    state.revision = revision
    return state


def small() -> Arrays:
    return {
        "b": np.arange(7, dtype=np.int16),
        "a": np.linspace(0, 1, 5, dtype=np.float64),
        'ü"\n': np.zeros((3, 4), np.uint8),
        "step": np.array(9, np.int64),
    }


def large() -> Arrays:
    """Several pieces, an incomplete last one, and many small tensors in between."""
    random = np.random.default_rng(1)
    arrays: Arrays = {f"t{number}": np.full(number + 1, number, np.int32) for number in range(200)}
    arrays["noise"] = random.integers(0, 256, 3 * limits.CHECKPOINT_PIECE_BYTES + 77, np.uint8)
    arrays["weights"] = random.standard_normal(limits.CHECKPOINT_PIECE_BYTES // 2).astype(np.float32)
    return arrays


def blank(arrays: Arrays) -> Arrays:
    return {name: np.full_like(array, 99) for name, array in arrays.items()}


def assert_equal(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)


def assert_loads(path: Path, arrays: Arrays, revision: int) -> None:
    loaded = blank(arrays)
    state = state_of(loaded)
    state.load_state(path)
    assert_equal(loaded, arrays)
    assert state.revision == revision


class Target:
    """A state that a load must not change."""

    def __init__(self, like: Arrays) -> None:
        self.arrays = blank(like)
        self.state = state_of(self.arrays, 3)

    def refuses(self, path: Any, error: type[zpccl.PCCLError], text: str | None = None) -> zpccl.PCCLError:
        with pytest.raises(error, match=text) as raised:
            self.state.load_state(path)
        assert_equal(self.arrays, blank(self.arrays))
        assert self.state.revision == 3
        assert raised.value.function == "SharedState.load_state"
        return raised.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.safetensors"


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


# --- What comes back --------------------------------------------------------------------------------------------------


def test_shapes_and_the_order_of_tensors_do_not_matter(path: Path) -> None:
    """Only elements count: a state has no shapes, and its keys have no order."""
    state_of({"a": np.arange(6.0), "b": np.ones(2)}).save_state(path)
    loaded: Arrays = {"b": np.zeros(2), "a": np.zeros((2, 3))}
    state_of(loaded).load_state(path)
    assert loaded["a"].ravel().tolist() == list(range(6)) and loaded["b"].tolist() == [1, 1]


def test_tied_tensors(path: Path) -> None:
    array = np.arange(10.0)
    state_of({"embedding": array, "head": array}).save_state(path)
    loaded = np.zeros(10)
    state_of({"embedding": loaded, "head": loaded}).load_state(path)
    assert_equal({"x": loaded}, {"x": array})


def test_the_same_state_makes_the_same_file(path: Path) -> None:
    """Backups and checksums of checkpoints rely on it."""
    data = []
    for _ in range(2):
        state_of(small(), 5).save_state(path)
        data.append(path.read_bytes())
    assert data[0] == data[1]


def test_a_newer_checkpoint_takes_the_place_of_the_old_one(path: Path) -> None:
    arrays = small()
    state_of(arrays, 1).save_state(path)
    os.chmod(path, 0o600)
    arrays["b"] += 1
    state_of(arrays, 2).save_state(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert_loads(path, arrays, 2)


def test_a_symbolic_link_stays_one(path: Path) -> None:
    path.symlink_to("elsewhere")
    arrays = small()
    state_of(arrays, 4).save_state(path)
    assert path.is_symlink() and files(path) == ["elsewhere", path.name]
    assert_loads(path, arrays, 4)


def test_paths_in_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    state_of(small()).save_state("x")
    state_of(small()).load_state(b"x")  # type: ignore[arg-type]  # Bytes, as os.fsencode makes them.
    assert files(path) == ["x"]


# --- Other programs ---------------------------------------------------------------------------------------------------


def header_of(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The metadata, and the type and shape of each tensor."""
    with safetensors.safe_open(path, "numpy") as opened:
        tensors = {name: opened.get_slice(name) for name in opened.offset_keys()}
        return opened.metadata(), {name: (row.get_dtype(), row.get_shape()) for name, row in tensors.items()}


def digest_of(metadata: dict[str, str], rows: dict[str, Any]) -> str:
    return blake3.blake3(json.dumps([metadata, rows], sort_keys=True).encode()).hexdigest()


@pytest.mark.parametrize("make", [small, large])
def test_what_was_saved_comes_back_to_us_and_to_others(path: Path, make: Callable[[], Arrays]) -> None:
    """With all types and shapes. Other programs can check the digests, as docs/shared_state.md says."""
    arrays = make()
    state_of(arrays, limits.REVISION_MAX).save_state(path)
    assert files(path) == [path.name]
    assert_loads(path, arrays, limits.REVISION_MAX)
    loaded = safetensors.numpy.load_file(path)
    assert_equal(loaded, arrays)
    assert all((loaded[name].dtype, loaded[name].shape) == (arrays[name].dtype, arrays[name].shape) for name in arrays)
    metadata, rows = header_of(path)
    digest = metadata.pop("blake3")
    assert digest == digest_of(metadata, rows)
    digests = {f"blake3:{name}": blake3.blake3(array.tobytes()).hexdigest() for name, array in arrays.items()}
    assert metadata == {"format": "pt", "revision": "9223372036854775807", **digests}


def test_tensors_in_the_file_are_aligned(path: Path) -> None:
    """So that a program can use the mapped file in place."""
    state_of(small()).save_state(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    assert size % 8 == 0
    assert all(row["data_offsets"][0] % (int(row["dtype"][1:]) // 8) == 0 for row in header.values())


def test_what_safetensors_wrote_is_loaded(path: Path) -> None:
    """In its own order of tensors and metadata."""
    arrays = small()
    state_of(arrays, 41).save_state(path)
    copied = path.with_name("copy")
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), copied, header_of(path)[0])
    assert copied.read_bytes() != path.read_bytes()
    assert_loads(copied, arrays, 41)


@pytest.mark.parametrize("datatype", zpccl.DataType)
def test_every_type(path: Path, datatype: zpccl.DataType) -> None:
    """For BFLOAT16, which numpy does not have, the bits."""
    is_bfloat16 = datatype is zpccl.DataType.BFLOAT16
    array = np.arange(50).astype(np.uint16 if is_bfloat16 else datatype.to_numpy_dtype())
    loaded = np.zeros_like(array)

    def regions(memory: np.ndarray[Any, Any]) -> dict[str, Region]:
        return {"x": region(view(memory, "x", writable=True, datatype=datatype), "x")}

    checkpoint.save(regions(array), {"x": (5, 10)}, 1, path, lambda *_: None)
    ((name, found),) = safetensors.deserialize(path.read_bytes())
    assert (name, found["shape"], bytes(found["data"])) == ("x", [5, 10], array.tobytes())
    if is_bfloat16:
        assert found["dtype"] == "BF16"
    else:
        assert safetensors.numpy.load_file(path)["x"].dtype == array.dtype
    checkpoint.load(regions(loaded), path, lambda *_: None).write()
    assert loaded.tobytes() == array.tobytes()


@pytest.mark.torch
def test_torch_tensors(path: Path) -> None:
    import safetensors.torch
    import torch

    def state(tensors: dict[str, torch.Tensor]) -> zpccl.SharedState:
        return zpccl.SharedState([zpccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()])

    tensors = {
        "w": torch.randn(100, 30).bfloat16(),
        "p": torch.nn.Parameter(torch.randn(10)),
        "step": torch.tensor(7),
    }
    state(tensors).save_state(path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state(loaded).load_state(path)
    for found in (loaded, safetensors.torch.load_file(path)):
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)
        assert all(found[name].dtype == tensors[name].dtype for name in tensors)


def test_a_name_that_no_tensor_can_have(path: Path) -> None:
    with pytest.raises(zpccl.InvalidArgument, match="__metadata__"):
        state_of({"__metadata__": np.zeros(3)}).save_state(path)
    assert files(path) == []


# --- Files that are refused -------------------------------------------------------------------------------------------


def test_a_flipped_bit_is_noticed(path: Path) -> None:
    """In any byte, at any position in it. If the byte belongs to a tensor, the error names the tensor."""
    arrays: Arrays = {"a": np.arange(7, dtype=np.int16)}
    state_of(arrays, 41).save_state(path)
    good = path.read_bytes()
    target = Target(arrays)
    for bit in range(0, 8 * len(good), 3):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        error = target.refuses(path, zpccl.CheckpointDamaged)
        assert isinstance(error, zpccl.CheckpointDamaged)
        assert (error.path, error.tensor) == (str(path), "a" if bit // 8 >= len(good) - 14 else "")


def test_a_file_of_another_length_is_refused(path: Path) -> None:
    arrays = small()
    state_of(arrays, 41).save_state(path)
    good = path.read_bytes()
    target = Target(arrays)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        target.refuses(path, zpccl.CheckpointDamaged)
    path.write_bytes(good + b"\0")
    target.refuses(path, zpccl.CheckpointDamaged)


@pytest.mark.parametrize("name", ["t199", "noise", "weights"])
def test_a_damaged_tensor_is_named_and_all_are_left_as_they_were(path: Path, name: str) -> None:
    arrays = large()
    state_of(arrays).save_state(path)
    data = path.read_bytes()
    place = data.index(arrays[name].tobytes()) + arrays[name].nbytes - 1
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    Target(arrays).refuses(path, zpccl.CheckpointDamaged, f"{path}: tensor '{name}' does not match its digest: it has")


@pytest.mark.parametrize(
    "data",
    [b"", b"\x93", b"PK\3\4 a zip file", bytes(1000), os.urandom(1000), safetensors.numpy.save(small())],
    ids=["empty", "one byte", "zip", "zeros", "noise", "no digest"],  # Workers must agree about names.
)
def test_other_files_are_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    Target(small()).refuses(path, zpccl.CheckpointDamaged, "not a safetensors file|metadata has no digest")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"author": "anybody"}, None),
        ({"blake3": None}, "no digest"),
        ({"blake3": "0" * 64}, "header does not match"),
        *[({"revision": text}, "no revision") for text in (None, "", "-1", "1.5", "x", str(limits.REVISION_MAX + 1))],
        *[({"blake3:a": text}, "tensor 'a' does not match") for text in (None, "", "0" * 64)],
    ],
)
def test_what_the_metadata_must_have(path: Path, changes: dict[str, str | None], text: str | None) -> None:
    """The writer of the file gave the header its digest, whatever the header contains."""
    arrays = small()
    state_of(arrays, 41).save_state(path)
    metadata, rows = header_of(path)
    del metadata["blake3"]
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    if "blake3" not in changes:
        metadata["blake3"] = digest_of(metadata, rows)
    safetensors.numpy.save_file(arrays, path, metadata)
    if text is None:
        assert_loads(path, arrays, 41)
    else:
        Target(arrays).refuses(path, zpccl.CheckpointDamaged, text)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"b": np.zeros(8, np.uint8)}, r"missing in the file: \['a'\], only in the file: \['b'\]"),
        ({"a": np.zeros(8, np.uint8), "b": np.zeros(8)}, r"missing in the file: \[\], only in the file: \['b'\]"),
        ({"a": np.zeros(8, np.int8)}, "'a' has 8 elements of U8, in the checkpoint 8 of I8"),
        ({"a": np.zeros((3, 3), np.uint8)}, "'a' has 8 elements of U8, in the checkpoint 9 of U8"),
    ],
)
def test_checkpoints_of_other_tensors_are_refused(path: Path, arrays: Arrays, text: str) -> None:
    state_of(arrays).save_state(path)
    Target({"a": np.zeros(8, np.uint8)}).refuses(path, zpccl.InvalidArgument, text)


# --- Paths and the system ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, 5, "", "a\0b", ["x"]])
def test_bad_paths_are_refused(bad: Any) -> None:
    Target(small()).refuses(bad, zpccl.InvalidArgument, "path")
    with pytest.raises(zpccl.InvalidArgument, match="path"):
        state_of(small()).save_state(bad)


@pytest.mark.parametrize("call", ["save_state", "load_state"])
def test_what_the_system_refuses(path: Path, call: str) -> None:
    loop = path.with_name("loop")
    loop.symlink_to(loop)
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    before = files(path)
    cases = [
        (path.parent / "missing" / "x", errno.ENOENT),
        (path.parent, errno.EISDIR),
        (pipe, errno.EINVAL),
        (loop, errno.ELOOP),
        (path.with_name("x" * 300), errno.ENAMETOOLONG),
    ]
    for bad, number in cases:
        with pytest.raises(zpccl.CheckpointFailed) as raised:
            getattr(state_of(small()), call)(bad)
        assert isinstance(raised.value, OSError)
        assert (raised.value.errno, raised.value.path) == (number, os.path.realpath(bad))
    assert files(path) == before


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_partial_file_that_cannot_be_written_is_named(path: Path, make: Callable[[Path], None]) -> None:
    partial = path.with_name(path.name + ".partial")
    make(partial)
    with pytest.raises(zpccl.CheckpointFailed, match=re.escape(f"{os.path.realpath(partial)}: ")) as raised:
        state_of(small()).save_state(path)
    assert raised.value.path == os.path.realpath(path) and raised.value.errno in (errno.EISDIR, errno.EINVAL)
    assert files(path) == [partial.name]


def test_a_rename_that_fails_names_the_checkpoint(path: Path) -> None:
    """A directory takes the name of the checkpoint in the middle of the save."""

    def take_its_name(_: zpccl.Progress) -> None:
        path.mkdir(exist_ok=True)

    with pytest.raises(zpccl.CheckpointFailed, match=re.escape(f"{os.path.realpath(path)}: ")):
        state_of(small()).save_state(path, on_progress=take_its_name)
    assert files(path) == [path.name]


def test_a_disk_that_is_full_leaves_the_old_checkpoint(path: Path) -> None:
    """Files have a size limit: the system refuses to extend them in the middle of a write, as on a full disk."""
    state_of(small(), 1).save_state(path)
    with (
        limited(resource.RLIMIT_FSIZE, 2 * limits.CHECKPOINT_PIECE_BYTES),
        pytest.raises(zpccl.CheckpointFailed) as raised,
    ):
        state_of(large(), 2).save_state(path)
    assert raised.value.errno == errno.EFBIG
    assert files(path) == [path.name]
    assert_loads(path, small(), 1)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_any_refusal_leaves_the_old_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    arrays = small()
    state_of(arrays, 1).save_state(path)
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(f"zpccl.state.checkpoint.os.{call}", refuse)
        with pytest.raises(zpccl.CheckpointFailed, match="No space left") as raised:
            state_of(arrays, 2).save_state(path)
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == before and files(path) == [path.name]


def test_short_writes_are_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("zpccl.state.checkpoint.os.write", lambda descriptor, data: write(descriptor, data[:1000]))
    arrays = large()
    state_of(arrays, 1).save_state(path)
    assert_loads(path, arrays, 1)


def test_all_is_on_the_disk_before_the_name_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash of the machine, no name may belong to a file without contents."""
    calls: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls.append(name)
            return function(*arguments)

        return call

    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(f"zpccl.state.checkpoint.os.{name}", noting(name, getattr(os, name)))
    state_of(small()).save_state(path)
    assert list(dict.fromkeys(calls)) == ["write", "fsync", "replace"] and calls[-3:] == ["fsync", "replace", "fsync"]


# --- Interrupts and others --------------------------------------------------------------------------------------------


def interrupt(progress: zpccl.Progress) -> None:
    """Raises in the middle of the work."""
    if progress.bytes_done:
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_leaves_all_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROGRESS_INTERVAL_NS", 0)  # So that every callback is due.
    arrays = large()
    state_of(arrays, 1).save_state(path)
    with pytest.raises(KeyboardInterrupt):
        state_of(blank(arrays), 2).save_state(path, on_progress=interrupt)
    assert files(path) == [path.name]
    assert_loads(path, arrays, 1)
    loaded = blank(arrays)
    state = state_of(loaded, 3)
    with pytest.raises(KeyboardInterrupt):
        state.load_state(path, on_progress=interrupt)
    assert_equal(loaded, blank(arrays))
    assert state.revision == 3


def test_an_interrupt_while_tensors_are_written_comes_too_late(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either all tensors are written or none is: the interrupt comes after the first one."""
    arrays = large()
    state_of(arrays, 41).save_state(path)
    loaded = blank(arrays)
    state = state_of(loaded, 3)
    write = HostRegion.write

    def write_and_be_interrupted(memory: HostRegion, offset: int, data: Any) -> None:
        monkeypatch.setattr(HostRegion, "write", write)
        memory.write(offset, data)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HostRegion, "write", write_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.load_state(path)
    assert_equal(loaded, arrays)
    assert state.revision == 41


def test_what_a_killed_process_left_is_written_over(path: Path) -> None:
    path.with_name(path.name + ".partial").write_bytes(os.urandom(100_000))
    state_of(small(), 1).save_state(path)
    assert files(path) == [path.name]
    assert_loads(path, small(), 1)


def test_two_at_a_time_are_refused(path: Path) -> None:
    """Our checkpoint is correct, whatever the other process does."""
    arrays = small()

    def save_again(progress: zpccl.Progress) -> None:
        if not progress.is_done:
            with pytest.raises(zpccl.InvalidUsage, match="give each one its own file"):
                state_of(arrays, 2).save_state(path)
            refused.append(True)

    refused: list[bool] = []
    state_of(arrays, 1).save_state(path, on_progress=save_again)
    assert refused
    assert_loads(path, arrays, 1)


def test_a_partial_file_that_is_finished_meanwhile_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the lock renamed it between our open and our lock: it is the checkpoint now, not to be cut."""
    arrays = small()
    partial = path.with_name(path.name + ".partial")
    state_of(arrays, 1).save_state(partial)
    good = partial.read_bytes()
    flock = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        partial.rename(path)
        flock(descriptor, operation)

    monkeypatch.setattr("zpccl.state.checkpoint.fcntl.flock", lock)
    with pytest.raises(zpccl.InvalidUsage, match="another"):
        state_of(arrays, 2).save_state(path)
    assert path.read_bytes() == good and files(path) == [path.name]


def test_a_partial_file_that_is_a_link_is_not_followed(path: Path) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name(path.name + ".partial").symlink_to(victim)
    with pytest.raises(zpccl.CheckpointFailed):
        state_of(small()).save_state(path)
    assert victim.read_text() == "precious"


def test_progress_of_both(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PROGRESS_INTERVAL_NS", 0)  # So that every callback is due.
    arrays = large()
    total = sum(array.nbytes for array in arrays.values())
    for call in ("save", "load"):
        seen: list[zpccl.Progress] = []
        getattr(state_of(arrays), f"{call}_state")(path, on_progress=seen.append)
        assert {progress.operation for progress in seen} == {call}
        assert (seen[0].bytes_done, seen[-1].bytes_done, seen[-1].bytes_expected) == (0, total, total)
        steps = [after.bytes_done - before.bytes_done for before, after in pairwise(seen)]
        assert max(steps) == limits.CHECKPOINT_PIECE_BYTES
        with pytest.raises(zpccl.InvalidArgument, match="called"):
            getattr(state_of(arrays), f"{call}_state")(path, on_progress=5)


def test_neither_copies_more_than_it_must(path: Path) -> None:
    """A save copies no tensor, and a load keeps one copy aside."""
    size = 16 * limits.CHECKPOINT_PIECE_BYTES
    state = state_of({"x": np.ones(size, np.uint8)})
    peaks = []
    for call in (state.save_state, state.load_state):
        tracemalloc.start()
        call(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[0] < limits.CHECKPOINT_PIECE_BYTES and size <= peaks[1] < size + limits.CHECKPOINT_PIECE_BYTES


def test_tied_tensors_with_different_contents_in_the_file_are_refused(path: Path) -> None:
    """The same memory cannot hold both."""
    state_of({"a": np.ones(3), "b": np.full(3, 2.0), "c": np.ones(3)}, 5).save_state(path)
    array, other = np.full(3, 9.0), np.full(3, 9.0)
    with pytest.raises(zpccl.InvalidArgument, match="'a' and 'b' are the same memory"):
        state_of({"a": array, "b": array, "c": other}).load_state(path)
    assert array.tolist() == other.tolist() == [9.0] * 3
    state_of({"a": array, "b": other, "c": array}).load_state(path)
    assert (array.tolist(), other.tolist()) == ([1.0] * 3, [2.0] * 3)


@pytest.mark.parametrize("call", ["save_state", "load_state"])
def test_a_path_that_cannot_be_resolved(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    state = state_of(small())
    with pytest.raises(zpccl.InvalidArgument, match="not the path of a file"):
        getattr(state, call)(f"{path}\ud800")
    path.parent.joinpath("gone").mkdir()
    monkeypatch.chdir(path.parent / "gone")
    path.parent.joinpath("gone").rmdir()
    with pytest.raises(zpccl.CheckpointFailed) as raised:
        getattr(state, call)("state.safetensors")
    assert raised.value.errno == errno.ENOENT


@pytest.mark.parametrize(("call", "code"), [("open", errno.EACCES), ("fsync", errno.EINVAL), ("fsync", errno.ENOTSUP)])
def test_a_directory_that_cannot_be_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Nobody may list it, or it is on a network file system. The checkpoint has its name: nothing has failed."""
    real = getattr(os, call)

    def refuse(what: Any, *arguments: Any) -> Any:
        if stat.S_ISDIR(os.stat(what).st_mode) if call == "fsync" else arguments[0] & os.O_DIRECTORY:
            raise OSError(code, os.strerror(code))
        return real(what, *arguments)

    monkeypatch.setattr(os, call, refuse)
    state_of(small(), 5).save_state(path)
    monkeypatch.undo()
    assert_loads(path, small(), 5)
