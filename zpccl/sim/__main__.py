"""`python -m zpccl.sim`: runs seeds, says which fail, and how to replay them."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter

from zpccl.limits import SECOND
from zpccl.sim.cluster import Violation
from zpccl.sim.faults import PROFILES
from zpccl.sim.runs import AUTO, STEPS, choose_faults, replay_command, run_seed


def parse_seeds(text: str) -> range:
    """A number of seeds from 0 on, or FIRST:END."""
    first, colon, end = text.partition(":")
    seeds = range(int(first), int(end)) if colon else range(int(text))
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text} names no seed")
    return seeds


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
    parser.add_argument("--trace", action="store_true", help="print a line for each event and effect")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first seed that fails")
    options = parser.parse_args(arguments)
    if options.peers < 0 or options.steps < 1:
        parser.error("--peers must not be negative, --steps must be positive")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    seeds = options.seeds if options.seed is None else (options.seed,)
    failed: list[int] = []
    totals: Counter[str] = Counter()
    began = time.monotonic()
    how = {"peers": options.peers, "steps": options.steps, "faults": options.faults}
    for count, seed in enumerate(seeds, 1):
        try:
            cluster = run_seed(seed, **how, tracer=print if options.trace else None)
        except BrokenPipeError:  # Whoever read the trace has seen enough.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except Exception as error:  # noqa: BLE001 - whatever a machine raises is a find
            failed.append(seed)
            if not isinstance(error, Violation):
                traceback.print_exc()
            name = choose_faults(options.faults, seed).name
            print(f"\nseed {seed} ({name}) failed: {type(error).__name__}: {error}")
            print(f"replay: {replay_command(seed, **how)}", flush=True)
            if not options.keep_going:
                break
            continue
        progress = cluster.checkers.progress
        totals.update(
            steps=cluster.step_count,
            commits=progress.committed_count,
            aborts=progress.aborted_count,
            answers=progress.answered_count,
            faults=len(cluster.incidents),
            seconds=cluster.clock.now_ns // SECOND,
        )
        if sys.stderr.isatty():
            print(f"\r{count}/{len(seeds)} seeds, {len(failed)} failed", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    elapsed = time.monotonic() - began
    print(
        f"{count} seeds, {len(failed)} failed; {totals['steps']} events in {totals['seconds']} simulated seconds,"
        f" {totals['faults']} faults, {totals['answers']} calls answered, parts of attempts: {totals['commits']}"
        f" committed, {totals['aborts']} aborted; {elapsed:.1f} s, {elapsed / count * 1000:.0f} ms a seed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
