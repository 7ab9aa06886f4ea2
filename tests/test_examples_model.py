"""The model, the text and the optimisers of examples/diloco_text.py: all of it that needs no peers."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import zpccl

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def diloco() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diloco_text", EXAMPLES / "diloco_text.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_gradient_is_that_of_finite_differences(diloco: ModuleType) -> None:
    """In float64, so that the difference quotient is exact to about eight digits."""
    random = np.random.default_rng(0)
    model = diloco.Model(0, hidden=7, dtype=np.float64)
    model.parameters += 0.1 * random.standard_normal(model.parameters.shape)  # Moves biases away from 0.
    contexts = random.integers(len(diloco.VOCABULARY), size=(5, diloco.CONTEXT))
    targets = random.integers(len(diloco.VOCABULARY), size=5)
    model.loss(contexts, targets, backward=True)
    gradient = model.gradient.copy()
    step = 1e-6
    used = np.flatnonzero(gradient)
    assert used.size > 0.1 * gradient.size
    for index in used:
        kept = model.parameters[index]
        model.parameters[index] = kept + step
        above = model.loss(contexts, targets)
        model.parameters[index] = kept - step
        below = model.loss(contexts, targets)
        model.parameters[index] = kept
        assert gradient[index] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


def test_gradient_of_characters_that_do_not_occur_is_zero(diloco: ModuleType) -> None:
    model = diloco.Model(0, hidden=7)
    contexts = np.full((3, diloco.CONTEXT), 5)
    model.loss(contexts, np.array([1, 2, 3]), backward=True)
    embedding = model.gradient[: len(diloco.VOCABULARY) * diloco.EMBEDDING].reshape(len(diloco.VOCABULARY), -1)
    assert np.flatnonzero(embedding.any(axis=1)).tolist() == [5]


@pytest.mark.slow
def test_a_new_model_knows_nothing_and_learns(diloco: ModuleType) -> None:
    """The first loss is that of guessing among all characters. With a text that repeats itself it falls to about 0."""
    model = diloco.Model(1)
    text = np.tile(np.frombuffer(b"def f(x):", dtype=np.uint8) - 31, 2 * diloco.BLOCK // 9)
    blocks = diloco.shard(text, 0, 1)
    probe = diloco.windows(blocks, 64, np.random.default_rng(1))
    assert model.loss(*probe) == pytest.approx(math.log(len(diloco.VOCABULARY)), abs=0.3)
    adam = diloco.AdamW(model.parameters.size)
    diloco.inner_steps(model, adam, blocks, 60, np.random.default_rng(2))
    assert model.loss(*probe) < 0.2


def test_outer_steps_average_what_two_shards_teach(diloco: ModuleType) -> None:
    """Two models train on one half each, and are averaged as peers do: the loss on held-out text falls."""
    text, held_out = diloco.load_text()
    probe = diloco.windows(diloco.shard(held_out, 0, 1), 512, np.random.default_rng(0))
    model = diloco.Model(0, hidden=64)
    adams = [diloco.AdamW(model.parameters.size) for _ in range(2)]
    outer = diloco.Outer(model.parameters)
    losses = [model.loss(*probe)]
    for step in range(3):
        gradients = []
        for rank, adam in enumerate(adams):
            model.parameters[:] = outer.parameters
            random = np.random.default_rng((0, step, rank))
            diloco.inner_steps(model, adam, diloco.shard(text, rank, 2), 40, random)
            gradients.append(outer.parameters - model.parameters)
        outer.step(np.mean(gradients, axis=0))
        model.parameters[:] = outer.parameters
        losses.append(model.loss(*probe))
    assert outer.state.revision == 3
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.75 * losses[0]


def test_outer_step_is_nesterov(diloco: ModuleType) -> None:
    """Against the textbook form: momentum m = mu m + g, then a step of lr along g + mu m."""
    outer = diloco.Outer(np.zeros(1, np.float32))
    lr, mu = diloco.OUTER_LR, diloco.OUTER_MOMENTUM
    outer.step(np.ones(1, np.float32))
    assert outer.parameters[0] == pytest.approx(-lr * (1 + mu))
    outer.step(np.ones(1, np.float32))
    assert outer.parameters[0] == pytest.approx(-lr * (1 + mu) - lr * (1 + mu * (mu + 1)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shards_are_disjoint_and_leave_nothing_out(diloco: ModuleType, world_size: int) -> None:
    blocks = 23
    text = np.arange(blocks * diloco.BLOCK + 5)
    shards = [diloco.shard(text, rank, world_size) for rank in range(world_size)]
    dealt = np.concatenate([part.ravel() for part in shards])
    assert np.array_equal(np.sort(dealt), np.arange(blocks * diloco.BLOCK))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_windows_stay_within_their_block_and_reach_its_end(diloco: ModuleType) -> None:
    blocks = np.arange(3 * 40).reshape(3, 40)
    contexts, targets = diloco.windows(blocks, 2000, np.random.default_rng(0))
    assert contexts.shape == (2000, diloco.CONTEXT) and targets.shape == (2000,)
    assert np.array_equal(contexts, targets[:, None] + np.arange(-diloco.CONTEXT, 0))
    assert np.array_equal(contexts[:, 0] // 40, targets // 40)
    assert set(targets % 40) == set(range(diloco.CONTEXT, 40))


def test_held_out_files_are_not_trained_on(diloco: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each file of a test library consists of one letter, so that tokens identify their file."""
    letters = "abcdefghijklmnopqrstuvwxy"
    for letter in letters:
        (tmp_path / f"{letter}.py").write_text(letter * 10)
    monkeypatch.setattr(diloco.os, "__file__", str(tmp_path / "os.py"))
    train, held_out = diloco.load_text()
    read = ["".join(sorted({diloco.VOCABULARY[token] for token in part})) for part in (train, held_out)]
    assert read[1] == "aku"
    assert sorted(read[0] + read[1]) == list(letters)
    assert len(train) + len(held_out) == 10 * len(letters)


def test_bars_come_and_go_with_transfers(
    diloco: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a callback is only logged, so nobody would see it in a run. A failed transfer leaves its bar."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    show = diloco.bars()
    for operation in ("load", "fetch", "fetch", "save"):
        show(zpccl.Progress(operation, 0, 2**20, 0.0, 0.0, None))
        show(zpccl.Progress(operation, 2**19, 2**21, 1.0, 2.0**19, 3.0))
    for operation in ("fetch", "load", "save", "fetch"):
        show(zpccl.Progress(operation, 2**20, 2**20, 2.0, 2.0**20, 0.0, is_done=True))
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("load", "fetch", "save", "1.0/1.0 MiB"))


def test_bars_need_a_terminal(diloco: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    show = diloco.bars()
    for is_done in (False, True):
        show(zpccl.Progress("fetch", 2**20, 2**20, 2.0, 2.0**20, 0.0, is_done=is_done))
    assert not capsys.readouterr().out
