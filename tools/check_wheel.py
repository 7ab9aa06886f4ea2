"""Checks the wheel and the sdist in a folder: `python tools/check_wheel.py dist`, which `make wheel` runs.

The wheel must have the tags of one build for all CPythons from 3.10 up, and contain the compiled extension. It must
install and all-reduce in a new virtual environment that has no compiler and cannot see this checkout. The sdist must
contain the C sources.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL_NAME = re.compile(r"zpccl-[^-]+-cp310-abi3-(many)?linux_\w+\.whl")
TIMEOUT_S = 300
"""Timeout to install the wheel, and to run it."""


def only(folder: Path, pattern: str) -> Path:
    """The one file of `folder` that matches `pattern`.

    Raises:
        SystemExit: there is none, or more than one.
    """
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder}: expected one {pattern}, found {[path.name for path in found]}")
    return found[0]


def check_wheel_contents(wheel: Path) -> list[str]:
    """Problems with the name and the files of `wheel`."""
    problems = []
    if not WHEEL_NAME.fullmatch(wheel.name):
        problems.append(f"{wheel.name}: expected the tags cp310-abi3-linux_<machine>")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zpccl").rglob("*.py")}
    wanted = sources | {"zpccl/py.typed", "zpccl/engine/_native.abi3.so"}
    problems += [f"{wheel.name}: lacks {name}" for name in sorted(wanted - names)]
    strangers = {name for name in names if not re.match(r"zpccl(-[^/]+\.dist-info)?/", name)}
    problems += [f"{wheel.name}: holds {name}, which is no part of the package" for name in sorted(strangers)]
    return problems


def check_sdist_contents(sdist: Path) -> list[str]:
    """Files that `sdist` lacks but that building, testing and running need."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"setup.cfg", "setup.py", "pyproject.toml", "Makefile", "LICENSE", "README.md"}
    for pattern in "native/**/*.[ch] native/*.py native/Makefile tests/**/*.[ch] tests/**/*.py tools/**/*.py".split():
        wanted |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
    return [f"{sdist.name}: lacks {name}" for name in sorted(wanted - names)]


def run_in_empty_environment(wheel: Path) -> None:
    """Installs `wheel` into a new virtual environment, and runs `smoke.py` there without a compiler in PATH.

    Raises:
        subprocess.CalledProcessError: one of the two failed.
    """
    with tempfile.TemporaryDirectory(prefix="zpccl-wheel-") as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("PYTHON", "ZPCCL_"))}
        environment |= {"PATH": str(python.parent), "CC": "/bin/false", "CXX": "/bin/false"}
        install = "-m pip install --quiet --disable-pip-version-check --only-binary :all:".split()
        for arguments in ([*install, str(wheel)], ["-I", str(ROOT / "tools" / "smoke.py")]):
            command = [str(python), *arguments]
            subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True
            )


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    wheel = only(folder, "*.whl")
    sdist = only(folder, "*.tar.gz")
    problems = check_wheel_contents(wheel) + check_sdist_contents(sdist)
    if problems:
        raise SystemExit("\n".join(problems))
    run_in_empty_environment(wheel)
    print(f"{wheel.name}, {sdist.name}: complete; the wheel runs without a compiler")


if __name__ == "__main__":
    main()
