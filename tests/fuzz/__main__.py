"""Runs a fuzz target under atheris (libFuzzer): `python -m fuzz master --seconds 60`, from tests/.

Its findings are kept in a separate directory, and the next run begins with them. An input that fails is written beside
that directory, and `--input FILE` runs the target with it once. The exit status is 0 if nothing failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path


def main() -> None:
    """Parses the command line and fuzzes until the time is over. libFuzzer ends the process."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=["messages", "handshake", "master"])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--directory", type=Path, default=Path("../out/fuzz"), help="of inputs (default %(default)s)")
    parser.add_argument("--input", type=Path, help="run this one only")
    options = parser.parse_args()
    if options.input is not None:
        importlib.import_module(f"fuzz.fuzz_{options.target}").one_input(options.input.read_bytes())
        return
    import atheris  # After the arguments: a single input does not need it.

    with atheris.instrument_imports(include=["zpccl.protocol", "zpccl.control.handshake"]):
        target = importlib.import_module(f"fuzz.fuzz_{options.target}")
    corpus = options.directory / options.target
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    libfuzzer = [f"-max_total_time={options.seconds}", f"-artifact_prefix={options.directory}{os.sep}", "-max_len=2048"]
    atheris.Setup([sys.argv[0], *libfuzzer, str(corpus)], target.one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
