"""`python -m zpccl.sim`: runs seeds, says which fail, and how to replay them."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from zpccl.sim.faults import KINDS, PROFILES
from zpccl.sim.runs import AUTO, STEPS, Failure, Tally, replay_command, run_seeds

SEEDS_PER_CHUNK_MAX = 200
"""What a process runs at a time: enough to make handing over cheap, few enough to see progress."""


def parse_seeds(text: str) -> range:
    """A number of seeds from 0 on, or FIRST:END."""
    first, colon, end = text.partition(":")
    seeds = range(int(first), int(end)) if colon else range(int(text))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} names no seed")
    return seeds


def parse_kinds(text: str) -> tuple[str, ...]:
    """Kinds of faults."""
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such faults: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


def parse_numbers(text: str) -> tuple[int, ...]:
    """Numbers of faults."""
    return tuple(int(number) for number in text.split(","))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zpccl.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", type=parse_seeds, metavar="N|A:B", help="run seeds 0 to N-1, or A to B-1")
    parser.add_argument("--peers", type=int, default=0, help="peers at the start; 0 (default): 2 to 6, by the seed")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"events before healing (default {STEPS})")
    parser.add_argument(
        "--faults", choices=[AUTO, *PROFILES], default=AUTO, help="profile; auto (default): by the seed"
    )
    parser.add_argument("--without", type=parse_kinds, default=(), metavar="KIND,...", help="faults that never strike")
    parser.add_argument(
        "--skip", type=parse_numbers, default=(), metavar="N,...", help="faults to leave out, by number"
    )
    parser.add_argument("--coverage", action="store_true", help="print what was reached")
    parser.add_argument("--json", metavar="FILE", help="write what was reached to a file")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run seeds; 0: one for each core")
    parser.add_argument("--trace", action="store_true", help="print a line for each event and effect")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    options = parser.parse_args(arguments)
    if options.peers < 0 or options.steps < 1 or options.jobs < 0:
        parser.error("--peers and --jobs must not be negative, --steps must be positive")
    return options


def split(seeds: range, jobs: int) -> list[range]:
    """The seeds in chunks, in order."""
    size = max(1, min(SEEDS_PER_CHUNK_MAX, len(seeds) // (4 * jobs)))
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def run_chunks(seeds: range, jobs: int, how: dict[str, Any]) -> Iterator[Tally]:
    """What became of the seeds, chunk by chunk and in order, whichever process is faster."""
    run = functools.partial(run_seeds, **how)
    chunks = split(seeds, jobs)
    if jobs == 1 or len(chunks) == 1:
        yield from map(run, chunks)
        return
    # Forked, what the caller has changed in the machines is changed there too.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    with context.Pool(jobs) as pool:
        yield from pool.imap(run, chunks)


def report(failure: Failure, how: dict[str, Any]) -> None:
    """Says what failed, and how to see it again."""
    if failure.details:
        print(failure.details, file=sys.stderr)
    print(f"\nseed {failure.seed} ({failure.profile}) failed: {failure.error}")
    print(f"replay: {replay_command(failure.seed, **how)}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    how = {name: getattr(options, name) for name in ("peers", "steps", "faults", "without", "skip")}
    search: dict[str, Any] = {"keep_going": options.keep_going, "covers": options.coverage or options.json is not None}
    if options.trace:
        search["tracer"], jobs = print, 1  # Else lines of several seeds would mix.
    tally = Tally()
    began = time.monotonic()
    try:
        for part in run_chunks(seeds, jobs, {**how, **search}):
            tally.add(part)
            for failure in part.failures:
                report(failure, how)
            if sys.stderr.isatty():
                text = f"\r{tally.seeds}/{len(seeds)} seeds, {len(tally.failures)} failed"
                print(text, end="", file=sys.stderr, flush=True)
            if part.failures and not options.keep_going:
                break
    except BrokenPipeError:  # Whoever read the trace has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    if sys.stderr.isatty():
        print(file=sys.stderr)
    if options.coverage:
        print(*tally.coverage.lines(), sep="\n", end="\n\n")
    if options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"seeds": tally.seeds, **tally.coverage.as_json()}, file, indent=1)
    print(summarize(tally, time.monotonic() - began))
    return 1 if tally.failures else 0


def summarize(tally: Tally, elapsed: float) -> str:
    """The last line."""
    totals = tally.totals
    return (
        f"{tally.seeds} seeds, {len(tally.failures)} failed; {totals['steps']} events in {totals['seconds']} simulated"
        f" seconds, {totals['faults']} faults, {totals['answers']} calls answered, parts of attempts:"
        f" {totals['commits']} committed, {totals['aborts']} aborted; {elapsed:.1f} s,"
        f" {elapsed / tally.seeds * 1000:.1f} ms a seed"
    )


if __name__ == "__main__":
    sys.exit(main())
