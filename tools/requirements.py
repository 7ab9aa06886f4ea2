"""Prints the requirements of zpccl and of the named extras in setup.cfg, one per line.

    python tools/requirements.py test dev | pip install -r /dev/stdin

`make` installs them before it builds, so that a build needs no second, isolated environment. With --oldest each is the
oldest version that setup.cfg allows: `make test VENV=/tmp/oldest OLDEST=--oldest`.
"""

from __future__ import annotations

import argparse
import configparser
from pathlib import Path

SETUP_CFG = Path(__file__).resolve().parent.parent / "setup.cfg"


def requirements(extras: list[str], path: Path = SETUP_CFG) -> list[str]:
    """Requirement lines of zpccl and of `extras`.

    Raises:
        KeyError: no such extra.
    """
    config = configparser.ConfigParser()
    with path.open(encoding="utf-8") as file:
        config.read_file(file)
    texts = [config["options"]["install_requires"]]
    texts += [config["options.extras_require"][extra] for extra in extras]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", help="names of extras in setup.cfg")
    parser.add_argument("--oldest", action="store_true", help="print the oldest versions that setup.cfg allows")
    options = parser.parse_args()
    lines = requirements(options.extras)
    print("\n".join(line.replace(">=", "==") if options.oldest else line for line in lines))
