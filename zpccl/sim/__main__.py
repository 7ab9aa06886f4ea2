"""`python -m zpccl.sim`: runs seeds, and reports which fail and how to replay them."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

from zpccl.sim.faults import KINDS, PROFILES
from zpccl.sim.runs import AUTO, Failure, Setup, Tally, run_seeds
from zpccl.sim.shrink import shrink

SEEDS_PER_CHUNK_MAX = 200
"""Seeds per task of a worker process: enough to amortise the hand-over, few enough to show progress."""
SHRUNKEN_MAX = 3
"""Maximum number of failures that are shrunk; most others have the same cause."""
SHRINK_TIMEOUT_S = 30
"""Time limit for shrinking one failure."""


def parse_seeds(text: str) -> range:
    """Parses "N" (seeds 0 to N-1) or "FIRST:END"."""
    first, colon, end = text.partition(":")
    seeds = range(int(first), int(end)) if colon else range(int(text))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} names no seed")
    return seeds


def parse_kinds(text: str) -> tuple[str, ...]:
    """Parses a comma-separated list of kinds of faults."""
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no such faults: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


def parse_numbers(text: str) -> tuple[int, ...]:
    """Parses a comma-separated list of fault numbers."""
    return tuple(int(number) for number in text.split(","))


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zpccl.sim", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seed", type=int, help="run this seed")
    which.add_argument("--seeds", type=parse_seeds, metavar="N|A:B", help="run seeds 0 to N-1, or A to B-1")
    parser.add_argument("--peers", type=int, default=0, help="peers at the start; 0 (default): 2 to 6, by the seed")
    parser.add_argument("--steps", type=int, default=0, help="events before healing; 0 (default): by the profile")
    parser.add_argument(
        "--faults", choices=[AUTO, *PROFILES], default=AUTO, help="profile; auto (default): by the seed"
    )
    parser.add_argument("--without", type=parse_kinds, default=(), metavar="KIND,...", help="faults that never strike")
    parser.add_argument(
        "--skip", type=parse_numbers, default=(), metavar="N,...", help="faults to leave out, by number"
    )
    parser.add_argument("--haste", type=int, default=0, help="factor for the rates of faults; 0: by the steps")
    parser.add_argument("--no-shrink", action="store_true", help="do not shrink failures")
    parser.add_argument("--coverage", action="store_true", help="print coverage tables")
    parser.add_argument("--json", metavar="FILE", help="write coverage to a file")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes; 0: one per core")
    parser.add_argument("--trace", action="store_true", help="print one line per event and effect")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    options = parser.parse_args(arguments)
    if min(options.peers, options.jobs, options.haste, options.steps) < 0:
        parser.error("--peers, --steps, --jobs and --haste must not be negative")
    return options


def split(seeds: range, jobs: int) -> list[range]:
    """Splits the seeds into chunks, in order."""
    size = max(1, min(SEEDS_PER_CHUNK_MAX, len(seeds) // (4 * jobs)))
    return [seeds[first : first + size] for first in range(0, len(seeds), size)]


def run_chunks(seeds: range, jobs: int, run: Callable[[range], Tally]) -> Iterator[Tally]:
    """Yields the results of the chunks in order, whichever process finishes first."""
    chunks = split(seeds, jobs)
    if jobs == 1 or len(chunks) == 1:
        yield from map(run, chunks)
        return
    # A fork inherits what the caller has changed in the machines (planted faults).
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if "fork" in methods else None)
    with context.Pool(jobs) as pool:
        yield from pool.imap(run, chunks)


def report(failure: Failure, setup: Setup, seconds: int) -> None:
    """Prints a failure with its replay command, then its shrunken form. Shrinking takes `seconds`; 0: none."""
    if failure.details:
        print(failure.details, file=sys.stderr)
    print(f"\nseed {failure.seed} ({failure.profile}) failed: {failure.error}")
    print(f"replay: {setup.replay_command(failure.seed)}", flush=True)
    if not seconds:
        return
    end = time.monotonic() + seconds
    found = shrink(failure.seed, setup, lambda: time.monotonic() > end)
    if found is None:
        return print("a second run does not fail in the same way: it depends on more than its seed", flush=True)
    print(f"shrunken, in {found.runs} runs, to {found.summary}: {found.error}")
    print(f"replay: {found.setup.replay_command(failure.seed)}")
    print(f"the last {len(found.trace)} lines:", *found.trace, sep="\n  ", flush=True)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    seeds = options.seeds if options.seed is None else range(options.seed, options.seed + 1)
    jobs = options.jobs or len(os.sched_getaffinity(0))
    setup = Setup(**{kind.name: getattr(options, kind.name) for kind in fields(Setup)})
    covers = options.coverage or options.json is not None
    run = functools.partial(run_seeds, setup=setup, keep_going=options.keep_going, covers=covers)
    if options.trace:
        run, jobs = (
            functools.partial(run, tracer=print),
            1,
        )  # So that the lines of several seeds do not mix.
    shrinks_left = 0 if options.trace or options.no_shrink else SHRUNKEN_MAX
    tally = Tally()
    began = time.monotonic()
    try:
        for part in run_chunks(seeds, jobs, run):
            tally.add(part)
            for failure in part.failures:
                report(failure, setup, SHRINK_TIMEOUT_S if shrinks_left else 0)
                shrinks_left = max(0, shrinks_left - 1)
            if sys.stderr.isatty():
                text = f"\r{tally.seeds}/{len(seeds)} seeds, {len(tally.failures)} failed"
                print(text, end="", file=sys.stderr, flush=True)
            if part.failures and not options.keep_going:
                break
    except BrokenPipeError:  # The reader of the trace has closed the pipe.
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
    """The last line of output."""
    totals = tally.totals
    return (
        f"{tally.seeds} seeds, {len(tally.failures)} failed; {totals['steps']} events in {totals['seconds']} simulated"
        f" seconds, {totals['faults']} faults, {totals['answers']} calls answered, parts of attempts:"
        f" {totals['commits']} committed, {totals['aborts']} aborted; {elapsed:.1f} s,"
        f" {elapsed / tally.seeds * 1000:.1f} ms a seed"
    )


if __name__ == "__main__":
    sys.exit(main())
