"""Checkpoints: what comes back is what was saved, and nothing else ever does; whatever fails changes nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import pytest

import zpccl
from zpccl import checkpoint, limits
from zpccl.dataplane.state_codec import ZSTD_FAST, encode

Arrays = dict[str, "np.ndarray[Any, Any]"]


def state_of(arrays: Arrays, revision: int = 0) -> zpccl.SharedState:
    state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(array, name) for name, array in arrays.items()])
    state.revision = revision
    return state


def small() -> Arrays:
    return {
        "b": np.arange(7, dtype=np.int16),
        "a": np.linspace(0, 1, 5, dtype=np.float64),
        "ü": np.zeros((3, 4), np.uint8),
    }


def large() -> Arrays:
    """Several blocks, a ragged end, blocks of zeros, and many small tensors between."""
    random = np.random.default_rng(1)
    arrays: Arrays = {f"t{number}": np.full(number + 1, number, np.int32) for number in range(200)}
    arrays["noise"] = random.integers(0, 256, 3 * limits.CHECKPOINT_BLOCK_BYTES + 77, np.uint8)
    arrays["weights"] = random.standard_normal(limits.CHECKPOINT_BLOCK_BYTES // 2).astype(np.float32)
    arrays["zeros"] = np.zeros(2 * limits.CHECKPOINT_BLOCK_BYTES, np.uint8)
    return arrays


def copy(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def blank(arrays: Arrays) -> Arrays:
    return {name: np.full_like(array, 99) for name, array in arrays.items()}


def assert_equal(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], name)


class Target:
    """A state that a load must leave as it is."""

    def __init__(self, like: Arrays) -> None:
        self.arrays = blank(like)
        self.state = state_of(self.arrays, 3)
        self._before = copy(self.arrays)

    def refuses(self, path: Any, error: type[zpccl.PCCLError], text: str | None = None) -> zpccl.PCCLError:
        with pytest.raises(error, match=text) as raised:
            self.state.load_state(path)
        assert_equal(self.arrays, self._before)
        assert self.state.revision == 3
        assert raised.value.function == "SharedState.load_state"
        return raised.value


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.zpccl"


def files(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


# --- What comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [small, large])
def test_what_was_saved_comes_back(path: Path, make: Callable[[], Arrays]) -> None:
    arrays = make()
    state_of(arrays, 41).save_state(path)
    loaded = blank(arrays)
    state = state_of(loaded)
    state.load_state(str(path))
    assert_equal(loaded, arrays)
    assert state.revision == 41
    assert files(path) == [path.name]


@pytest.mark.parametrize("datatype", sorted(set(zpccl.DataType) - {zpccl.DataType.BFLOAT16}))
def test_every_type(path: Path, datatype: zpccl.DataType) -> None:
    arrays: Arrays = {"x": np.arange(50).astype(datatype.to_numpy_dtype())}
    state_of(arrays).save_state(path)
    loaded = blank(arrays)
    state_of(loaded).load_state(path)
    assert_equal(loaded, arrays)


@pytest.mark.torch
def test_torch_tensors(path: Path) -> None:
    import torch

    def state(tensors: dict[str, torch.Tensor]) -> zpccl.SharedState:
        return zpccl.SharedState([zpccl.TensorInfo.from_torch(tensor, name) for name, tensor in tensors.items()])

    tensors = {"w": torch.randn(100, 30).bfloat16(), "p": torch.nn.Parameter(torch.randn(10))}
    state(tensors).save_state(path)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    state(loaded).load_state(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_shapes_and_the_order_of_tensors_do_not_matter(path: Path) -> None:
    """Elements count: a state has no shapes, and its keys no order."""
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


def test_zeros_take_next_to_nothing_and_noise_not_more_than_itself(path: Path) -> None:
    size = 8 * limits.CHECKPOINT_BLOCK_BYTES
    state_of({"zeros": np.zeros(size, np.uint8)}).save_state(path)
    assert path.stat().st_size < size // 1000
    state_of({"noise": np.random.default_rng(0).integers(0, 256, size, np.uint8)}).save_state(path)
    assert path.stat().st_size < size * 1.001


def test_the_same_state_makes_the_same_file(path: Path) -> None:
    """Whatever threads finish first; backups and checksums of checkpoints rely on it."""
    for name in ("one", "two"):
        state_of(large(), 5).save_state(path.with_name(name))
    assert path.with_name("one").read_bytes() == path.with_name("two").read_bytes()


def test_a_newer_checkpoint_takes_the_place_of_the_old_one(path: Path) -> None:
    arrays = small()
    state_of(arrays, 1).save_state(path)
    os.chmod(path, 0o600)
    arrays["b"] += 1
    state_of(arrays, 2).save_state(path)
    loaded = blank(arrays)
    state = state_of(loaded)
    state.load_state(path)
    assert (state.revision, stat.S_IMODE(path.stat().st_mode)) == (2, 0o600)
    assert_equal(loaded, arrays)


def test_a_symbolic_link_stays_one(path: Path) -> None:
    path.symlink_to("elsewhere")
    arrays = small()
    state_of(arrays, 4).save_state(path)
    assert path.is_symlink() and files(path) == ["elsewhere", path.name]
    loaded = blank(arrays)
    state_of(loaded).load_state(path)
    assert_equal(loaded, arrays)


def test_paths_in_the_working_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    state_of(small()).save_state("x")
    state_of(small()).load_state(b"x")  # type: ignore[arg-type]  # As os.fsencode makes them.
    assert files(path) == ["x"]


# --- Files that are refused -------------------------------------------------------------------------------------------


def test_any_bit_flipped_is_noticed(path: Path) -> None:
    arrays: Arrays = {"a": np.arange(7, dtype=np.int16)}
    state_of(arrays, 41).save_state(path)
    good = path.read_bytes()
    target = Target(arrays)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        target.refuses(path, zpccl.CheckpointDamaged)


def test_a_file_cut_short_at_any_length_is_refused(path: Path) -> None:
    arrays = small()
    state_of(arrays, 41).save_state(path)
    good = path.read_bytes()
    target = Target(arrays)
    for size in range(len(good)):
        path.write_bytes(good[:size])
        target.refuses(path, zpccl.CheckpointDamaged)


@pytest.mark.parametrize("extra", [b"\0", b"x" * 36, b"x" * 100])
def test_a_file_that_goes_on_is_refused(path: Path, extra: bytes) -> None:
    arrays = small()
    state_of(arrays).save_state(path)
    path.write_bytes(path.read_bytes() + extra)
    Target(arrays).refuses(path, zpccl.CheckpointDamaged)


def test_damage_in_a_late_block_leaves_all_as_it_was(path: Path) -> None:
    """Earlier blocks, and other tensors, are right: they are not written either."""
    arrays = large()
    state_of(arrays).save_state(path)
    data = bytearray(path.read_bytes())
    data[-limits.CHECKPOINT_BLOCK_BYTES] ^= 1
    path.write_bytes(data)
    error = Target(arrays).refuses(path, zpccl.CheckpointDamaged, "block [0-9]+ of tensor '(noise|weights)'")
    assert isinstance(error, zpccl.CheckpointDamaged)
    assert error.path == str(path) and "block" in error.reason


def test_blocks_of_another_checkpoint_are_refused(path: Path) -> None:
    """As a disk leaves them that lost a write: each is right, but not in its place."""
    old, new = large(), large()
    new["noise"] = new["noise"][::-1].copy()
    state_of(old).save_state(path)
    stale = path.read_bytes()
    state_of(new).save_state(path)
    data = bytearray(path.read_bytes())
    assert len(data) == len(stale)
    middle = len(data) // 2
    data[:middle] = stale[:middle]
    path.write_bytes(data)
    Target(new).refuses(path, zpccl.CheckpointDamaged, "digest")


@pytest.mark.parametrize("data", [b"", b"\x93", b"PK\3\4 a zip file", bytes(1000), os.urandom(1000)])
def test_other_files_are_refused(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    Target(small()).refuses(path, zpccl.CheckpointDamaged, "no checkpoint|cut short")


def encoded(size: int) -> bytes:
    """A block of so many zeros."""
    return b"".join(encode(memoryview(bytes(size)), 1, ZSTD_FAST))


class Forger:
    """Writes files whose digests are right and whose contents are not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.revision, self.rows = 1, [["a", int(zpccl.DataType.UINT8), 8]]
        self.version = limits.CHECKPOINT_VERSION
        self.table: bytes | None = None
        self.payloads = [encoded(8)]
        self.sizes: list[int] | None = None

    def write(self) -> None:
        import msgspec

        table = msgspec.msgpack.encode([self.revision, self.rows]) if self.table is None else self.table
        sealed = checkpoint._SEALED_HEAD.pack(checkpoint._MAGIC, self.version, len(table))
        head = sealed + blake3.blake3(sealed + table).digest()
        sizes = self.sizes or [len(payload) for payload in self.payloads]
        index = b"".join(
            checkpoint._ENTRY.pack(size, blake3.blake3(payload).digest())
            for size, payload in zip(sizes, self.payloads, strict=True)
        )
        end = blake3.blake3(head + index).digest()
        self.path.write_bytes(head + table + b"".join(self.payloads) + index + end)


@pytest.fixture
def forger(path: Path) -> Forger:
    return Forger(path)


def refusal(forger: Forger, error: type[zpccl.PCCLError], text: str) -> None:
    forger.write()
    Target({"a": np.zeros(8, np.uint8)}).refuses(forger.path, error, text)


def test_the_forger_can_write_good_files(forger: Forger) -> None:
    """So that the refusals below are for what they say."""
    forger.write()
    arrays: Arrays = {"a": np.ones(8, np.uint8)}
    state = state_of(arrays)
    state.load_state(forger.path)
    assert state.revision == 1 and not arrays["a"].any()


def test_a_newer_version_is_named(forger: Forger) -> None:
    forger.version += 1
    refusal(forger, zpccl.CheckpointDamaged, "version 2.*newer")


@pytest.mark.parametrize("table", [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x92\x01\xdd\xff\xff\xff\xff", b"\x90"])
def test_malformed_tables_are_refused(forger: Forger, table: bytes) -> None:
    forger.table = table
    refusal(forger, zpccl.CheckpointDamaged, "table")


def test_a_table_that_claims_more_than_there_is(forger: Forger) -> None:
    """Nobody allocates what a file merely claims."""
    forger.write()
    data = bytearray(forger.path.read_bytes())
    for size in (limits.MESSAGE_BYTES_MAX, 2**32 - 1):
        data[12:16] = size.to_bytes(4, "big")
        forger.path.write_bytes(data)
        Target(small()).refuses(forger.path, zpccl.CheckpointDamaged, "cut short|too long")


@pytest.mark.parametrize("revision", [-1, limits.REVISION_MAX + 1, "1", 1.5])
def test_revisions_out_of_bounds_are_refused(forger: Forger, revision: Any) -> None:
    forger.revision = revision
    refusal(forger, zpccl.CheckpointDamaged, "table")


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**32 - 1])
def test_sizes_of_blocks_that_are_wrong_are_refused(forger: Forger, size: int) -> None:
    forger.sizes = [size]
    refusal(forger, zpccl.CheckpointDamaged, "blocks end|more than it can need")


@pytest.mark.parametrize(
    "payload",
    [b"", b"\0", bytes(32), os.urandom(40), encoded(9), b"\xff" * 40],
    ids=["empty", "a byte", "zeros", "noise", "another size", "ones"],
)
def test_payloads_that_are_no_blocks_are_refused(forger: Forger, payload: bytes) -> None:
    """Their digests are right: whoever made them meant harm, or had a bug."""
    forger.payloads = [payload]
    refusal(forger, zpccl.CheckpointDamaged, "block 0 of tensor 'a'")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([["b", 0, 8]], r"missing in the file: \['a'\]; only in the file: \['b'\]"),
        ([["a", 0, 8], ["b", 0, 8]], r"only in the file: \['b'\]"),
        ([["a", 1, 8]], "'a' has 8 elements of UINT8, in the checkpoint 8 of INT8"),
        ([["a", 0, 2**40]], "'a' has 8 elements of UINT8, in the checkpoint 1099511627776 of UINT8"),
        ([["a", 99, 8]], "8 of type 99"),
    ],
)
def test_checkpoints_of_other_tensors_are_refused(forger: Forger, rows: list[list[Any]], text: str) -> None:
    forger.rows = rows
    refusal(forger, zpccl.InvalidArgument, text)


def test_tensors_twice_or_out_of_order_are_refused(path: Path, forger: Forger) -> None:
    forger.rows *= 2
    refusal(forger, zpccl.CheckpointDamaged, "order")


def test_a_tensor_that_was_resized(path: Path) -> None:
    arrays: Arrays = {"a": np.arange(5.0)}
    state = state_of(arrays, 1)
    state.save_state(path)
    arrays["a"].resize(9, refcheck=False)
    for call in (state.save_state, state.load_state):
        with pytest.raises(zpccl.InvalidArgument, match=r"'a' had 5 elements of DOUBLE .* has 9"):
            call(path)
    Target({"a": np.zeros(9)}).refuses(path, zpccl.InvalidArgument, "9 elements of DOUBLE, in the checkpoint 5")


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
        assert (raised.value.errno, isinstance(raised.value, OSError)) == (number, True), bad
    assert files(path) == before


def test_a_missing_file(path: Path) -> None:
    error = Target(small()).refuses(path, zpccl.CheckpointFailed, "No such file")
    assert isinstance(error, zpccl.CheckpointFailed)
    assert (error.errno, error.path) == (errno.ENOENT, str(path))


@pytest.fixture
def small_disk() -> Iterator[int]:
    """Files cannot grow beyond so many bytes: the system refuses it in the middle of a write, as on a full disk."""
    size = 2 * limits.CHECKPOINT_BLOCK_BYTES
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_leaves_the_old_checkpoint(path: Path, small_disk: int) -> None:
    arrays = small()
    state_of(arrays, 1).save_state(path)
    with pytest.raises(zpccl.CheckpointFailed) as raised:
        state_of(large(), 2).save_state(path)
    assert raised.value.errno == errno.EFBIG
    assert files(path) == [path.name]
    loaded = blank(arrays)
    state_of(loaded).load_state(path)
    assert_equal(loaded, arrays)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_any_refusal_leaves_the_old_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    arrays = small()
    state_of(arrays, 1).save_state(path)
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(f"zpccl.checkpoint.os.{call}", refuse)
        with pytest.raises(zpccl.CheckpointFailed, match="No space left") as raised:
            state_of(arrays, 2).save_state(path)
    assert raised.value.errno == errno.ENOSPC
    assert path.read_bytes() == before and files(path) == [path.name]


def test_short_writes_are_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("zpccl.checkpoint.os.write", lambda descriptor, data: write(descriptor, data[:1000]))
    arrays = large()
    state_of(arrays).save_state(path)
    loaded = blank(arrays)
    state_of(loaded).load_state(path)
    assert_equal(loaded, arrays)


def test_all_is_on_the_disk_before_the_name_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash of the machine the name must not be that of a file without contents."""
    calls: list[str] = []
    for name in ("write", "fsync", "replace"):
        monkeypatch.setattr(f"zpccl.checkpoint.os.{name}", _noting(calls, name, getattr(os, name)))
    state_of(small()).save_state(path)
    assert [call for call in calls if call != "write"] == ["fsync", "replace", "fsync"]
    assert calls.index("fsync") > max(index for index, call in enumerate(calls) if call == "write")


def _noting(calls: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(name)
        return function(*arguments)

    return call


# --- Interrupts and others --------------------------------------------------------------------------------------------


def test_an_interrupt_leaves_the_old_checkpoint_and_no_thread(path: Path) -> None:
    """S4: the caller's memory is read by nobody after the call."""
    arrays = large()
    state_of(arrays, 1).save_state(path)
    before = path.read_bytes()
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        state_of(arrays, 2).save_state(path, on_progress=lambda _: signal.raise_signal(signal.SIGINT))
    assert threading.active_count() == threads
    assert path.read_bytes() == before and files(path) == [path.name]


def test_an_interrupt_of_a_load_leaves_all_as_it_was(path: Path) -> None:
    arrays = large()
    state_of(arrays).save_state(path)
    loaded = blank(arrays)
    before = copy(loaded)
    state = state_of(loaded, 3)
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        state.load_state(path, on_progress=lambda _: signal.raise_signal(signal.SIGINT))
    assert threading.active_count() == threads
    assert_equal(loaded, before)
    assert state.revision == 3


def test_an_interrupt_while_tensors_are_written_comes_too_late(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All or nothing: whatever of it was written, the rest follows."""
    arrays = large()
    state_of(arrays, 41).save_state(path)
    loaded = blank(arrays)
    state = state_of(loaded, 3)
    write = checkpoint.Loaded.write

    def write_and_be_interrupted(staged: checkpoint.Loaded) -> None:
        monkeypatch.setattr(checkpoint.Loaded, "write", write)
        staged._pieces[0].memory.write(0, b"\1")
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint.Loaded, "write", write_and_be_interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.load_state(path)
    assert_equal(loaded, arrays)
    assert state.revision == 41


def test_what_a_killed_process_left_is_written_over(path: Path) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(os.urandom(100_000))
    arrays = small()
    state_of(arrays).save_state(path)
    assert files(path) == [path.name]
    state_of(blank(arrays)).load_state(path)


def test_two_at_a_time_are_refused(path: Path) -> None:
    """Ours is as it should be, whatever the other does."""
    arrays = small()

    def save_again(progress: zpccl.Progress) -> None:
        if not progress.is_done:
            with pytest.raises(zpccl.InvalidUsage, match="another"):
                state_of(arrays, 2).save_state(path)
            refused.append(True)

    refused: list[bool] = []
    state_of(arrays, 1).save_state(path, on_progress=save_again)
    assert refused
    state = state_of(blank(arrays))
    state.load_state(path)
    assert state.revision == 1


def test_a_partial_file_that_is_finished_meanwhile_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process opened it, then got the lock when it had its name already: it would cut the good one."""
    arrays = small()
    partial = path.with_name(path.name + ".partial")
    state_of(arrays, 1).save_state(partial)
    good = partial.read_bytes()
    flock = fcntl.flock

    def lock(descriptor: int, operation: int) -> None:
        if not path.exists():
            partial.rename(path)
        flock(descriptor, operation)

    monkeypatch.setattr("zpccl.checkpoint.fcntl.flock", lock)
    descriptor = checkpoint._create_locked(str(partial))
    try:
        assert path.read_bytes() == good
        assert os.path.samestat(os.fstat(descriptor), partial.stat()) and partial.stat().st_size == 0
    finally:
        os.close(descriptor)


def test_a_partial_file_that_is_a_link_is_not_followed(path: Path) -> None:
    victim = path.with_name("victim")
    victim.write_text("precious")
    path.with_name(path.name + ".partial").symlink_to(victim)
    with pytest.raises(zpccl.CheckpointFailed):
        state_of(small()).save_state(path)
    assert victim.read_text() == "precious"


def test_progress_of_both(path: Path) -> None:
    arrays = large()
    total = sum(array.nbytes for array in arrays.values())
    for call in ("save", "load"):
        seen: list[zpccl.Progress] = []
        getattr(state_of(arrays), f"{call}_state")(path, on_progress=seen.append)
        assert {progress.operation for progress in seen} == {call}
        assert (seen[0].bytes_done, seen[-1].bytes_done, seen[-1].bytes_expected) == (0, total, total)
        with pytest.raises(zpccl.InvalidArgument, match="called"):
            getattr(state_of(arrays), f"{call}_state")(path, on_progress=5)
