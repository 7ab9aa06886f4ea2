"""Compiles the simulator and the protocol with mypyc, for campaigns of many seeds. Each takes less than half the time.

    python tools/compile_sim.py /tmp/compiled
    cd /tmp/compiled && python -m zpccl.sim --seeds 100000 --jobs 0

The copy makes the same events as the interpreted simulator. The tool runs some seeds with both and compares all lines
of their traces before it reports success. It takes some minutes. mypyc comes with mypy.

Ownership: one process, and one child at a time.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common import run_tool, say

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("limits.py", "errors.py", "types.py", "protocol", "sim")
INTERPRETED = ("protocol/messages.py", "sim/faults.py", "sim/__main__.py")
"""Not compiled. msgspec makes its own classes. faults.py and __main__.py tell fields apart by annotations, which are
not strings in compiled classes."""
NOT_NATIVE = {"sim/cluster.py": "Violation", "protocol/election.py": "Election", "protocol/matrix.py": "Sample"}
"""Classes whose layout mypyc does not support: they are generic, or inherit from a class in C."""
INHERITED = {"Attempt"}
"""Base classes that are data classes: mypyc would give the subclasses the same constructor."""
CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "protocol/routes.py": (("cost_max = self._cost(route)", "cost_max = float(self._cost(route))"),),
    "protocol/master.py": ((" bound = self.registry.by_con", " bound: typing.Any = self.registry.by_con"),),
    "sim/dataplane.py": (("    node: SimulatedPeer\n    call_id", "    node: typing.Any\n    call_id"),),
    "sim/program.py": (("    node: SimulatedPeer\n    script", "    node: typing.Any\n    script"),),
    "sim/network.py": (
        ("    node: SimulatedPeer | None\n", "    node: typing.Any\n"),
        ("    master: SimulatedMaster\n", "    master: typing.Any\n"),
    ),
}
"""Replacements for types that mypyc infers, or checks at run time, more narrowly than mypy does."""
MARK = "compiled-zpccl-sim"
"""Name of an empty file in each copy. The tool replaces no folder without it."""
FUTURE = "from __future__ import annotations\n"
SLOTS = re.compile(r"@dataclass\((?P<before>[^)]*)slots=True(?:, )?(?P<after>[^)]*)\)")
ENUM = re.compile(rb"\balgorithm=\w+")
BOOLEAN = re.compile(rb"\b(?:True|False)\b")
"""Compiled code may hold an int where the interpreter holds a bool, and print its number in place of its name."""
BUILD = """
from mypyc.build import mypycify
from setuptools import setup
setup(name="compiled", packages=[], ext_modules=mypycify({arguments!r}, opt_level="3", debug_level="0"))
"""


class CannotCompile(Exception):
    """The copy cannot be made, or differs from the simulator."""


def changed(name: str, text: str) -> str:
    """The text of a module as mypyc can compile it.

    Raises:
        CannotCompile: the text to be replaced is missing.
    """
    text = SLOTS.sub(lambda found: f"@dataclass({(found['before'] + found['after']).removesuffix(', ')})", text)
    for before, after in CHANGES.get(name, ()):
        if text.count(before) != 1:
            raise CannotCompile(f"{name}: {before!r} is there {text.count(before)} times: mend CHANGES in this tool")
        text = text.replace(before, after)
    if name in NOT_NATIVE:
        pattern = rf"^((?:@.*\n)*class {NOT_NATIVE[name]}\b)"
        text, count = re.subn(pattern, r"@mypy_extensions.mypyc_attr(native_class=False)\n\1", text, flags=re.MULTILINE)
        if count != 1:
            raise CannotCompile(f"{name}: no class {NOT_NATIVE[name]}: mend NOT_NATIVE in this tool")
    text = with_constructors(text.replace("frozen=True", "unsafe_hash=True"))
    return text.replace(FUTURE, f"{FUTURE}import typing\nimport mypy_extensions\n", 1)


def with_constructors(text: str) -> str:
    """Writes out the constructors of data classes: generated ones are not compiled, and take ten times as long."""
    lines = text.splitlines(keepends=True)
    for node in reversed(ast.parse(text).body):
        if not isinstance(node, ast.ClassDef) or node.bases or node.name in INHERITED:
            continue
        how = [ast.unparse(decorator) for decorator in node.decorator_list]
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        made = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        is_plain = not any(isinstance(each.value, ast.Call) for each in fields)  # No field().
        if not fields or not is_plain or "__init__" in made or not any(each.startswith("dataclass") for each in how):
            continue
        order = "*, " if any("kw_only=True" in each for each in how) else ""
        names = [ast.unparse(each.target) for each in fields]
        takes = ", ".join(ast.unparse(ast.AnnAssign(each.target, each.annotation, each.value, 1)) for each in fields)
        body = [f"self.{name} = {name}" for name in names] + ["self.__post_init__()"] * ("__post_init__" in made)
        init = "".join(f"        {line}\n" for line in body)
        lines.insert(node.end_lineno or 0, f"\n    def __init__(self, {order}{takes}) -> None:\n{init}")
    return "".join(lines)


def copy(folder: Path) -> list[str]:
    """Makes the copy; returns the modules to compile, as paths in it."""
    package = folder / "zpccl"
    package.mkdir(parents=True)
    (folder / MARK).touch()
    (package / "__init__.py").touch()
    compiled = []
    for part in COPIED:
        path = ROOT / "zpccl" / part
        for source in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = source.relative_to(ROOT / "zpccl").as_posix()
            text = source.read_text(encoding="utf-8")
            is_compiled = path.is_dir() and name not in INTERPRETED
            if is_compiled:
                text = changed(name, text)
                compiled.append(f"zpccl/{name}")
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(text, encoding="utf-8")
    return compiled


def build(folder: Path, modules: list[str]) -> None:
    """Compiles the modules of a copy."""
    (folder / "setup.py").write_text(BUILD.format(arguments=["--ignore-missing-imports", *modules]), encoding="utf-8")
    log = folder / "build.log"
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        if subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT).returncode:
            raise CannotCompile(f"mypyc failed: read {log}")


def digest_of_traces(folder: Path, seeds: str) -> str:
    """A digest of the events that the simulator in this folder prints."""
    command = [sys.executable, "-m", "zpccl.sim", "--seeds", seeds, "--trace", "--no-shrink"]
    digest, last = hashlib.sha256(), b""  # The last line has the time, so the digest leaves it out.
    environment = os.environ | {"PYTHONPATH": str(folder)}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for line in child.stdout:
            digest.update(last)
            last = BOOLEAN.sub(lambda found: b"1" if found[0] == b"True" else b"0", ENUM.sub(b"", line))
    if child.returncode:
        raise CannotCompile(f"these seeds do not run in {folder}: {last.decode()}")
    return digest.hexdigest()


def play(options: argparse.Namespace) -> int:
    folder: Path = options.folder.resolve()
    if folder.exists():
        if not (folder / MARK).exists():
            raise CannotCompile(f"{folder} exists, and is no copy of this tool's")
        shutil.rmtree(folder)
    say(f"compiling a copy in {folder}, which takes some minutes")
    build(folder, copy(folder))
    say(f"comparing the traces of seeds {options.seeds}")
    if digest_of_traces(folder, options.seeds) != digest_of_traces(ROOT, options.seeds):
        raise CannotCompile(f"the copy in {folder} does not make the same events")
    say(f"the same events; now: cd {folder} && {sys.executable} -m zpccl.sim --seeds 100000 --jobs 0")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to put the copy: a new folder, or that of an older one")
    parser.add_argument("--seeds", default="0:40", metavar="A:B", help="seeds whose two traces are compared")
    options = parser.parse_args()
    try:
        return run_tool(lambda: play(options))
    except CannotCompile as error:
        say(f"failed: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
