"""Synchronous DiLoCo of a character-level language model, with peers that come and go.

    zpccl-master &                                # once
    python examples/diloco_text.py --steps 30     # on as many machines as you like, whenever you like

Every peer holds the same *outer* parameters. An outer step is:

    1. agree: admit newcomers, then sync the shared state, so that all members hold the same parameters;
    2. train: a few hundred AdamW steps on a copy of the parameters and this peer's own shard of the text;
    3. average the *outer gradient* (outer parameters - trained copy) over all members;
    4. take a step of Nesterov SGD along it. All members compute the same bits from the same bits.

Peers talk once per outer step instead of once per inner step, and so can train over the internet (Douillard et al.,
"DiLoCo", arXiv:2311.08105). A peer that dies costs the others one retry. A peer that joins gets parameters, momentum
and step number from the shared state. If all peers die, start them with `--checkpoint FILE --resume`: all continue from
the newest checkpoint. The training text is the source of the Python standard library, so there is nothing to download.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

import zpccl

Array = npt.NDArray[Any]

# --- Text: a token is a byte of ASCII -------------------------------------------------------------------------------

VOCABULARY = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 16  # Number of preceding characters that the model sees.
BLOCK = 4096  # Characters per block; a shard consists of blocks.
HELD_OUT_EVERY = 10  # Every tenth file is for validation.
_TOKEN_OF_BYTE = np.array([max(VOCABULARY.find(chr(byte)), 0) for byte in range(256)], dtype=np.uint8)


def load_text() -> tuple[Array, Array]:
    """The standard library's top-level modules, in order of their names, as tokens (uint8): training, validation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    tokens = [_TOKEN_OF_BYTE[np.frombuffer(file.read_bytes(), dtype=np.uint8)] for file in files]
    held_out = tokens[::HELD_OUT_EVERY]
    del tokens[::HELD_OUT_EVERY]
    return np.concatenate(tokens), np.concatenate(held_out)


def shard(text: Array, rank: int, world_size: int) -> Array:
    """The shard of a peer: every `world_size`-th block of the text, shape (blocks, BLOCK)."""
    return text[: len(text) // BLOCK * BLOCK].reshape(-1, BLOCK)[rank::world_size]


def windows(blocks: Array, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Random windows out of blocks: contexts, shape (count, CONTEXT), and the token after each, shape (count,)."""
    block = random.integers(len(blocks), size=count)
    start = random.integers(blocks.shape[1] - CONTEXT, size=count)
    return blocks[block[:, None], start[:, None] + np.arange(CONTEXT)], blocks[block, start + CONTEXT]


# --- Model: embed the context, one hidden layer, softmax over the next character ------------------------------------

EMBEDDING, HIDDEN = 24, 512


class Model:
    """A multi-layer perceptron. Its weights and their gradients are views of one flat vector each."""

    def __init__(self, seed: int, *, hidden: int = HIDDEN, dtype: npt.DTypeLike = np.float32) -> None:
        width, vocabulary = CONTEXT * EMBEDDING, len(VOCABULARY)
        shapes = [(vocabulary, EMBEDDING), (width, hidden), (hidden,), (hidden, vocabulary), (vocabulary,)]
        scales = [1.0, math.sqrt(2 / width), 0.0, 0.1 / math.sqrt(hidden), 0.0]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        self.parameters, self.gradient = np.zeros((2, ends[-1]), dtype)
        self._weights, self._gradients = (
            [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]
            for flat in (self.parameters, self.gradient)
        )
        random = np.random.default_rng(seed)
        for weight, scale in zip(self._weights, scales, strict=True):
            weight[:] = scale * random.standard_normal(weight.shape)

    def loss(self, contexts: Array, targets: Array, *, backward: bool = False) -> float:
        """Mean cross-entropy in nats per character; with `backward`, its gradient goes to `self.gradient`."""
        embedding, w1, b1, w2, b2 = self._weights
        rows = np.arange(len(targets))
        x = embedding[contexts].reshape(len(targets), -1)
        h = np.maximum(x @ w1 + b1, 0)
        logits = h @ w2 + b2
        p = np.exp(logits - logits.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        loss = float(-np.log(p[rows, targets]).mean())
        if backward:
            p[rows, targets] -= 1
            dlogits = p / len(targets)
            dh = (dlogits @ w2.T) * (h > 0)
            dx = (dh @ w1.T).reshape(-1, EMBEDDING)
            one_hot = np.eye(len(embedding), dtype=x.dtype)[contexts.ravel()]
            results = [one_hot.T @ dx, x.T @ dh, dh.sum(axis=0), h.T @ dlogits, dlogits.sum(axis=0)]
            for gradient, result in zip(self._gradients, results, strict=True):
                gradient[:] = result
        return loss


# --- Optimisers -----------------------------------------------------------------------------------------------------

INNER_LR, WARMUP_STEPS, BETA1, BETA2, WEIGHT_DECAY, BATCH = 1.5e-3, 50, 0.9, 0.99, 0.01, 128
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.6


class AdamW:
    """The inner optimiser (arXiv:1711.05101). Its moments are this peer's own and stay with it across outer steps."""

    def __init__(self, size: int) -> None:
        self.first, self.second = np.zeros((2, size), np.float32)
        self.steps = 0

    def step(self, parameters: Array, gradient: Array) -> None:
        """Updates `parameters` in place."""
        self.steps += 1
        self.first += (1 - BETA1) * (gradient - self.first)
        self.second += (1 - BETA2) * (gradient * gradient - self.second)
        mean = self.first / (1 - BETA1**self.steps)
        deviation = np.sqrt(self.second / (1 - BETA2**self.steps)) + 1e-8
        lr = INNER_LR * min(1.0, self.steps / WARMUP_STEPS)
        parameters -= lr * (mean / deviation + WEIGHT_DECAY * parameters)


def inner_steps(model: Model, adam: AdamW, blocks: Array, count: int, random: np.random.Generator) -> float:
    """Step 2: trains `model` on random windows of `blocks`; returns the mean loss."""
    losses = []
    for _ in range(count):
        losses.append(model.loss(*windows(blocks, BATCH, random), backward=True))
        adam.step(model.parameters, model.gradient)
    return float(np.mean(losses))


class Outer:
    """The state that is equal on all members. Its revision is the number of outer steps."""

    def __init__(self, parameters: Array) -> None:
        self.parameters = parameters.copy()
        self.momentum = np.zeros_like(parameters)
        tensors = {"parameters": self.parameters, "momentum": self.momentum}
        self.state = zpccl.SharedState([zpccl.TensorInfo.from_numpy(tensors[name], name) for name in tensors])

    def step(self, gradient: Array) -> None:
        """Step 4: Nesterov SGD, in place."""
        self.momentum *= OUTER_MOMENTUM
        self.momentum += gradient
        self.parameters -= OUTER_LR * (gradient + OUTER_MOMENTUM * self.momentum)
        self.state.revision += 1


# --- Progress bars --------------------------------------------------------------------------------------------------


def bars() -> Callable[[zpccl.Progress], None]:
    """Makes a callback that shows the progress of transfers (state, checkpoints) on the terminal. Needs rich."""
    from rich import progress as rich

    display = rich.Progress(
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(binary_units=True),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        transient=True,
        disable=not sys.stdout.isatty(),
    )
    tasks: dict[str, rich.TaskID] = {}

    def show(progress: zpccl.Progress) -> None:
        if progress.operation not in tasks:
            display.start()
            tasks[progress.operation] = display.add_task(progress.operation)
        task = tasks[progress.operation]
        display.update(task, completed=progress.bytes_done, total=progress.bytes_expected)
        if progress.is_done:
            display.stop()
            display.remove_task(tasks.pop(progress.operation))

    return show


# --- Peers ----------------------------------------------------------------------------------------------------------

QUANTIZE = dict(zip(("none", "minmax", "zps"), zpccl.QuantizationAlgorithm, strict=True))


def agree(comm: zpccl.Communicator, outer: Outer, args: argparse.Namespace, *, newcomer: bool) -> int:
    """Step 1: admits newcomers, waits for enough peers, syncs the state; returns the bytes moved.

    All members must make the same calls in the same order, so every branch here depends only on values that are equal
    on all of them. An all-reduced sum of ones is equal; `comm.world_size` is not, since members learn of a loss at
    different times. A newcomer's `connect` returns when the members' `update_topology` does, so it joins the sequence
    there.
    """
    waiting = False
    while True:
        try:
            if not newcomer and comm.are_peers_pending():
                comm.update_topology()
            newcomer = False
            if comm.all_reduce(np.ones(1), op=zpccl.ReduceOp.SUM)[0] >= args.min_peers:
                info = comm.sync_shared_state(outer.state)
                return info.tx_bytes + info.rx_bytes
        except zpccl.TooFewPeers:  # Alone.
            if args.min_peers <= 1:
                return 0
        except (zpccl.PeerLost, zpccl.UpdateTopologyFailed) as error:
            print(f"agreeing again: {error}", flush=True)  # All members got an error, so all start again.
            continue
        if outer.state.revision >= args.steps:
            return 0  # All steps are done, with equal results: no need to wait.
        if not waiting:
            print(f"waiting until {args.min_peers} peers are here", flush=True)
        waiting = True
        time.sleep(0.5)


def average(comm: zpccl.Communicator, gradient: Array, quantize: str) -> tuple[Array, zpccl.ReduceInfo]:
    """Step 3: the mean of all members' gradients. The last remaining peer uses its own."""
    mean = np.empty_like(gradient)
    options = zpccl.QuantizationOptions(zpccl.DataType.UINT8, QUANTIZE[quantize])
    while True:
        try:
            return mean, comm.all_reduce(gradient, mean, op=zpccl.ReduceOp.AVG, quantization_options=options)
        except zpccl.PeerLost as error:
            print(f"averaging again: {error}", flush=True)
        except zpccl.TooFewPeers:
            return gradient, zpccl.ReduceInfo(local_world_size=1, tx_bytes=0, rx_bytes=0)


def train(args: argparse.Namespace, log: TextIO) -> None:
    """Takes outer steps together with the other members, until `args.steps` are done."""
    text, held_out = load_text()
    validation = windows(shard(held_out, 0, 1), 4096, np.random.default_rng(0))  # The same on all peers, at every step.
    model = Model(args.seed)
    adam, outer = AdamW(len(model.parameters)), Outer(model.parameters)
    tell = bars() if args.progress else None
    if args.resume:
        outer.state.load_state(args.checkpoint, on_progress=tell)
    with zpccl.Communicator(args.master) as comm:  # Connects; returns when the members admit this peer.
        comm.on_progress(tell)
        newcomer = True
        while True:
            began = time.perf_counter()
            moved_bytes = agree(comm, outer, args, newcomer=newcomer)
            model.parameters[:] = outer.parameters
            if newcomer:
                report(log, outer.state.revision, peers=comm.world_size, validation_loss=model.loss(*validation))
                newcomer = False
            if outer.state.revision >= args.steps:
                break
            blocks = shard(text, comm.rank, comm.world_size)
            random = np.random.default_rng((args.seed, outer.state.revision, comm.rank))
            train_loss = inner_steps(model, adam, blocks, args.inner_steps, random)
            gradient, info = average(comm, outer.parameters - model.parameters, args.quantize)
            outer.step(gradient)
            if args.checkpoint:
                outer.state.save_state(args.checkpoint, on_progress=tell)
            model.parameters[:] = outer.parameters
            report(
                log,
                outer.state.revision,
                peers=info.local_world_size,
                train_loss=train_loss,
                validation_loss=model.loss(*validation),
                bytes=moved_bytes + info.tx_bytes + info.rx_bytes,
                seconds=time.perf_counter() - began,
            )
    report(log, outer.state.revision, sha256=hashlib.sha256(outer.parameters.tobytes()).hexdigest())


def report(log: TextIO, step: int, **facts: float | str) -> None:
    """Prints a line for people, and writes the same as JSON for programs."""
    text = (f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items())
    print(f"step {step:3}", *text, sep="  ", flush=True)
    print(json.dumps({"step": step, **facts}), file=log, flush=True)


def main() -> int:
    """Runs one peer; returns the exit status."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], formatter_class=formatter)
    parser.add_argument("--master", default=os.environ.get("ZPCCL_MASTER", "127.0.0.1:48148"), help="host:port")
    parser.add_argument("--steps", type=int, default=30, help="outer steps in total, by all peers")
    parser.add_argument("--inner-steps", type=int, default=200, help="inner steps of each outer step")
    parser.add_argument(
        "--quantize", choices=QUANTIZE, default="none", help="send outer gradients with 8 bits per element"
    )
    parser.add_argument("--min-peers", type=int, default=2, help="wait while there are fewer; 1: go on alone")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="this peer's, written after every outer step")
    parser.add_argument("--resume", action="store_true", help="start from the checkpoint")
    parser.add_argument("--progress", action="store_true", help="show progress bars of long transfers; needs rich")
    parser.add_argument("--seed", type=int, default=0, help="seed of the parameters and of the training windows")
    parser.add_argument("--json-log", default=os.devnull, metavar="FILE", help="write a line of JSON per outer step")
    args = parser.parse_args()
    if args.resume and not (args.checkpoint and args.checkpoint.is_file()):
        parser.error("--resume needs --checkpoint with a file that exists")
    if args.seed < 0 or args.inner_steps < 1:
        parser.error("--seed must be at least 0, and --inner-steps at least 1")
    try:
        with open(args.json_log, "w") as log:
            train(args, log)
    except KeyboardInterrupt:
        print("interrupted: left the run, the others go on", flush=True)
        return 130
    except (zpccl.PCCLError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
