"""Prints the requirements of zpccl and of the named extras in setup.cfg, one per line.

    python tools/requirements.py test dev | pip install -r /dev/stdin

`make` installs them before it builds, so that a build needs no second, isolated environment.
"""

from __future__ import annotations

import configparser
import sys
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
    print("\n".join(requirements(sys.argv[1:])))
