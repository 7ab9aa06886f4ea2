"""Runs Python tests with the C extension compiled for a sanitizer: `run_sanitized.py address tests/engine -x`.

The interpreter itself is not instrumented, so the sanitizer's runtime is preloaded. The sanitizer sees what the
extension does and, through malloc and memcpy, what other code does with its memory. The sources are copied to
build/sanitized, so that no test process, wherever it starts, loads another build of the extension.

Each process writes its sanitizer report to its own file. After the tests every such file counts as a failure, even if a
test kills the process or ignores its exit status.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    *("zpccl", "tests", "tools", "examples", "native", "docs"),
    *("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"),
)

CFLAGS = {
    "address": "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer",
    "thread": "-O1 -g -fsanitize=thread -fno-omit-frame-pointer",
}
# Also preloaded: the sanitizer intercepts C++ exceptions, so it must find the C++ runtime when it starts.
RUNTIMES = {"address": ("libasan.so", "libubsan.so", "libstdc++.so.6"), "thread": ("libtsan.so", "libstdc++.so.6")}
SUPPRESSIONS = ROOT / "tests" / "native" / "suppressions.tsan"


def copy_sources(tree: Path) -> None:
    """Copies the files that the tests need to `tree`, without compiled ones."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.exists():
            shutil.copy2(source, tree / name)


def build(tree: Path, sanitizer: str) -> None:
    """Compiles the extension into the copy."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--build-temp", str(tree.parent / "objects")]
    subprocess.run(command, cwd=tree, check=True, env={**os.environ, "ZPCCL_CFLAGS": CFLAGS[sanitizer]})


def library(name: str) -> str:
    """The path of a library of the C compiler."""
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    return subprocess.check_output([*compiler, f"-print-file-name={name}"], text=True).strip()


def environment(tree: Path, sanitizer: str, reports: Path) -> dict[str, str]:
    """The environment variables of the tests."""
    common = f"log_path={reports}/report:log_exe_name=1:handle_segv=1"
    return {
        **os.environ,
        "PYTHONPATH": str(tree),
        "LD_PRELOAD": " ".join(library(name) for name in RUNTIMES[sanitizer]),
        # One allocation per object, so that the sanitizer sees each of them.
        "PYTHONMALLOC": "malloc",
        # The interpreter never frees some memory; the C tests check the engine for leaks.
        "ASAN_OPTIONS": f"{common}:detect_leaks=0:strict_string_checks=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": f"{common}:print_stacktrace=1",
        "TSAN_OPTIONS": f"{common}:suppressions={SUPPRESSIONS}:die_after_fork=0:exitcode=0:report_signal_unsafe=0",
    }


def sees_the_sanitizer(tree: Path, sanitizer: str, env: dict[str, str]) -> bool:
    """True if a process would load the extension of the copy, and it is instrumented."""
    code = "import zpccl.engine._native as native; print(native.__file__)"
    path = Path(subprocess.check_output([sys.executable, "-c", code], text=True, env=env, cwd=tree).strip())
    symbol = {"address": b"__asan_report_load", "thread": b"__tsan_read"}[sanitizer]
    return path.is_relative_to(tree) and symbol in path.read_bytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=sorted(CFLAGS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of pytest")
    arguments = parser.parse_args()

    directory = ROOT / "build" / "sanitized" / arguments.sanitizer
    tree, reports = directory / "tree", directory / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir(parents=True)
    copy_sources(tree)
    build(tree, arguments.sanitizer)
    env = environment(tree, arguments.sanitizer, reports)
    if not sees_the_sanitizer(tree, arguments.sanitizer, env):
        print("the tests would not use the sanitized extension", file=sys.stderr)
        return 1
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments.arguments]
    status = subprocess.run(tests, cwd=tree, env=env, check=False).returncode
    found = sorted(reports.iterdir())
    for path in found:
        print(f"\n=== {path}\n{path.read_text(errors='replace')}", file=sys.stderr)
    print(f"{arguments.sanitizer} sanitizer: {len(found)} reports")
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main())
