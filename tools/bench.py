"""Runs one scenario on this machine: a benchmark of zpccl, or fault injection that checks its promises.

    python tools/bench.py                     lists the scenarios
    python tools/bench.py allreduce --help    describes a scenario
    python tools/bench.py allreduce --peers 2 --json FILE

A scenario prints one line per result as soon as it is measured, and a table of all results at the end. Exit status: 0;
1 if something failed or a promise was broken; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from benchmarks.scenario import Scenario
from common import Row, new_file, run_tool, say, write_json

SCENARIOS = {
    "allreduce": "How long does an all-reduce take, compared with torch's Gloo and with TCP alone?",
    "call": "How many wake-ups and system calls does an all-reduce take, compared with torch's Gloo?",
    "ddp": "How long does a training step of DDP take, compared with torch's Gloo?",
    "state": "How fast do newcomers get the shared state, from how many peers, compared with plain copies?",
    "join": "How long do members stop for a newcomer, with and without fetching the state ahead?",
    "wan": "How fast is an all-reduce over long fat networks, and with how many connections?",
    "uneven": "How long does an all-reduce take over uneven networks, compared with what they allow?",
    "master": "What does one decision cost a master of many peers?",
    "plans": "How close to the optimum are plans for uneven networks, and what do they cost the master?",
    "quantise": "How fast are the kernels of quantisation?",
    "memory": "How much memory does an all-reduce take beyond the caller's buffers?",
    "kill-peer": "What happens to the others when a peer is killed in the middle, and how fast?",
    "kill-calls": "Do all survivors see the same outcome when a peer is killed at any moment of small calls?",
    "state-faults": "What becomes of a sync of shared state when something happens in the middle of it?",
    "kill-master": "What does a kill and restart of the master cost the calls that are under way?",
    "cut-paths": "When do the others notice that a host or a path has fallen silent, and when do they go on?",
}
"""The modules of `benchmarks`, with "-" for "_", and the question that each one answers."""


def load(name: str) -> Scenario:
    """Imports the scenario of that name."""
    scenario: Scenario = importlib.import_module(f"benchmarks.{name.replace('-', '_')}").SCENARIO
    return scenario


def play(scenario: Scenario, options: argparse.Namespace) -> int:
    """Runs a scenario; returns the exit status."""
    rows: list[Row] = []
    with contextlib.closing(scenario.measure(options)) as found:  # Ctrl-C ends the processes that it has started.
        for row in found:
            rows.append(row)
            write_json(options.json, rows)  # After each row, so that an interrupted run keeps its results.
            say(scenario.line_of(row))
    if not rows:
        say("nothing was measured: none of these systems supports it")
        return 1
    scenario.print_tables(options, rows)
    problems = [problem for row in rows for problem in row.get("problems", ())]
    for problem in problems:
        say(f"a promise is broken: {problem}")
    if not problems and any("problems" in row for row in rows):
        print("\nall promises kept")
    return 1 if problems else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit status."""
    name, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if name not in SCENARIOS:
        width = max(map(len, SCENARIOS))
        listed = "\n".join(f"  {one.ljust(width)}  {question}" for one, question in SCENARIOS.items())
        print(f"{__doc__}\nScenarios:\n\n{listed}", file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    try:
        scenario = load(name)
    except ModuleNotFoundError as error:
        say(f"{name} needs the package {error.name}; `make venv` installs what scenarios need")
        return 2
    parser = argparse.ArgumentParser(
        prog=f"tools/bench.py {name}",
        description=f"{SCENARIOS[name]}\n\n{scenario.text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    scenario.add_arguments(parser)
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args(rest)
    if scenario.check is not None:
        scenario.check(parser, options)
    return run_tool(lambda: play(scenario, options))


if __name__ == "__main__":
    sys.exit(main())
