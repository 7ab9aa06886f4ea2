"""Contents of tensors for the benchmarks of shared state, all float32.

Trained weights are made once for each size and kept in a file below `build`, since training takes some 100 s per GiB.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
from common import Array, say

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "examples"))

from diloco_text import AdamW, Model, load_text, shard, windows  # noqa: E402

RANDOM, TRAINED, ZEROS, IDENTICAL = CONTENTS = ("random", "trained", "zeros", "identical")
TRAINING_STEPS, BATCH = 100, 32
"""Training steps per model: enough to halve the reducible part of the loss."""
_STALE = 1.0


def fill(flat: Array, contents: str, weights: Path | None) -> None:
    """Fills the state of holders: the same in every process.

    Args:
        flat: float32, one dimension.
        contents: of CONTENTS; `identical` is as random.
        weights: what `trained_weights` returned, for TRAINED.
    """
    if contents == ZEROS:
        flat.fill(0)
    elif contents == TRAINED:
        assert weights is not None
        flat[:] = np.load(weights, mmap_mode="r")[: flat.size]
    else:
        np.random.default_rng(0).standard_normal(out=flat, dtype=np.float32)


def make_stale(flat: Array) -> None:
    """Fills the state of joiners before a sync: different from `fill` everywhere, and cheap."""
    flat.fill(_STALE)


def trained_weights(count: int) -> Path:
    """The file with `count` trained weights; makes it if it does not exist.

    The weights are those of several models of the text example, each trained from its own seed.
    """
    path = _ROOT / "build" / "bench_state" / f"trained-{count}.npy"
    if path.exists():
        return path
    say("training models for their weights")
    text, _ = load_text()
    blocks = shard(text, 0, 1)
    flat = np.empty(count, np.float32)
    begin = seed = 0
    while begin < count:
        parameters = _train(seed, blocks)[: count - begin]
        flat[begin : begin + parameters.size] = parameters
        begin, seed = begin + parameters.size, seed + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.npy")
    try:
        np.save(unfinished, flat)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _train(seed: int, blocks: Array) -> Array:
    model, random = Model(seed), np.random.default_rng(seed)
    adam = AdamW(len(model.parameters))
    for _ in range(TRAINING_STEPS):
        model.loss(*windows(blocks, BATCH, random), backward=True)
        adam.step(model.parameters, model.gradient)
    parameters: Array = model.parameters
    return parameters
