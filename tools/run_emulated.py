"""Runs Python tests on 64-bit ARM, emulated by qemu: `run_emulated.py tests/engine -x`.

Needs Debian or a derived system, gcc-aarch64-linux-gnu and qemu-user. The first run downloads Debian's Python for ARM
with its libraries, and the packages that zpccl and its tests need, to build/arm64; it installs nothing. The extension
is compiled for ARM into a copy of the sources.

Tests that start another interpreter are left out: qemu emulates one process, and the system cannot execute it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from requirements import requirements
from run_sanitized import ROOT, copy_sources

DIRECTORY = ROOT / "build" / "arm64"
SYSTEM, PACKAGES, TREE, APT = (DIRECTORY / name for name in ("system", "packages", "tree", "apt"))
COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = ["qemu-aarch64", "-L", str(SYSTEM)]
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_26_aarch64", "manylinux2014_aarch64")
NOT_EMULATED = ("tests/engine/test_engine.py::test_the_interpreter_may_end_while_an_attempt_runs",)


def fetch_system() -> Path:
    """Unpacks Debian's Python for ARM of the same release, and returns the interpreter."""
    found = sorted(SYSTEM.glob("usr/bin/python3.[0-9]*"))
    if found:
        return found[-1]
    for part in ("lists/partial", "cache/archives/partial"):
        (APT / part).mkdir(parents=True, exist_ok=True)
    (APT / "status").touch()
    settings = {
        "Dir::State": APT,
        "Dir::State::lists": APT / "lists",
        "Dir::State::status": APT / "status",
        "Dir::Cache": APT / "cache",
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
    }
    apt = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    version = f"python3.{sys.version_info.minor}"
    subprocess.run([*apt, "update"], check=True)
    packages = [version, "libstdc++6", "libgomp1"]  # numpy and blosc2 need the others.
    subprocess.run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", *packages], check=True)
    for package in sorted((APT / "cache" / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "--extract", str(package), str(SYSTEM)], check=True)
    return SYSTEM / "usr" / "bin" / version


def fetch_packages() -> None:
    """Downloads the packages of zpccl and its tests for ARM."""
    if PACKAGES.exists():
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PACKAGES), "--only-binary=:all:"]
    command += [word for name in PLATFORMS for word in ("--platform", name)]
    subprocess.run([*command, "--python-version", version, *requirements(["secure", "test", "xxhash"])], check=True)


def build() -> None:
    """Compiles the extension for ARM into the copy; the headers of Python are the same on all 64-bit Linux."""
    sys.path.insert(0, str(TREE / "native"))
    build_native = importlib.import_module("build_native")
    source, target = DIRECTORY / "_native.c", TREE / "zpccl" / "engine" / "_native.abi3.so"
    build_native.ffibuilder.emit_c_code(str(source))
    command = [COMPILER, "-shared", "-fPIC", *build_native.COMPILE_ARGS, *build_native.INCLUDE_ARGS]
    command += ["-DPy_LIMITED_API", f"-I{sysconfig.get_path('include')}", str(source), *build_native.SOURCES]
    subprocess.run([*command, "-lm", "-o", str(target)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.usage = "%(prog)s [-h] [arguments of pytest ...]"
    arguments = parser.parse_known_args()[1]

    interpreter = fetch_system()
    fetch_packages()
    copy_sources(TREE)
    build()
    home = {"PYTHONHOME": str(SYSTEM / "usr"), "PYTHONPATH": f"{TREE}{os.pathsep}{PACKAGES}"}
    command = [*EMULATOR, str(interpreter), "-c", "import platform; print(platform.machine())"]
    machine = subprocess.check_output(command, text=True, env={**os.environ, **home}).strip()
    print(f"Python tests on {machine}, emulated on {platform.machine()}", flush=True)
    left_out = [f"--deselect={test}" for test in NOT_EMULATED]
    tests = [*EMULATOR, str(interpreter), "-m", "pytest", "-p", "no:cacheprovider", "-m", "not torch", *left_out]
    return subprocess.run([*tests, *arguments], cwd=TREE, env={**os.environ, **home}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
