"""The import law: what each layer may import. See CONTRIBUTING.md.

Sources are parsed, not imported. So an import counts wherever it is: in a function, under TYPE_CHECKING, or as a string
passed to importlib.import_module.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
VALUES = ("zpccl.errors", "zpccl.limits", "zpccl.types")
NATIVE = "zpccl.engine._native"
NATIVE_USER = "zpccl.engine.engine"

# Standard library without clock, randomness, threads, files or sockets.
PURE = frozenset(
    "__future__ abc array base64 binascii bisect collections contextlib copy dataclasses decimal enum fractions"
    " functools hashlib heapq hmac ipaddress itertools json keyword math numbers operator re reprlib string struct"
    " textwrap types typing zlib".split()
)
# Modules that would bring the real world into the simulated one, so that a seed would not replay.
WORLD = frozenset(
    "asyncio concurrent datetime multiprocessing secrets select selectors signal socket socketserver ssl subprocess"
    " threading time uuid _thread".split()
)
# Builtins that do I/O, load unknown code, or differ between processes.
IMPURE_BUILTINS = frozenset("__import__ breakpoint compile eval exec hash id input open print".split())


@dataclass(frozen=True)
class Import:
    """Line `line` of `module` imports `target`. `local`: in a function, so not when the module is imported."""

    module: str
    line: int
    target: str
    local: bool


def within(name: str, *packages: str) -> bool:
    """Whether `name` is one of `packages` or inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def top(name: str) -> str:
    """The top-level package of `name`."""
    return name.partition(".")[0]


def is_standard(name: str) -> bool:
    return top(name) in sys.stdlib_module_names


# --- Reading sources --------------------------------------------------------------------------------------------------


def load_sources(root: Path) -> dict[str, str]:
    """The sources of the package zpccl under `root`, by module name; a package is named as its `__init__`."""
    sources = {}
    for path in sorted((root / "zpccl").rglob("*.py")):
        sources[".".join(path.relative_to(root).with_suffix("").parts)] = path.read_text(encoding="utf-8")
    return sources


def public_name(module: str) -> str:
    return module.removesuffix(".__init__")


def is_dynamic(call: ast.Call) -> bool:
    """Whether `call` calls __import__ or import_module, under any name of importlib."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def from_targets(node: ast.ImportFrom, module: str, modules: set[str]) -> Iterator[str]:
    """The targets of `from BASE import NAME, ...`: BASE.NAME if that is a module, else BASE."""
    base = node.module or ""
    if node.level:
        parts = module.split(".")[: -node.level]  # __init__ is a part, so one level is the package itself.
        base = ".".join([*parts, *([base] if base else [])])
    for alias in node.names:
        name = f"{base}.{alias.name}"
        yield name if name in modules or name == NATIVE else base


def find_imports(module: str, source: str, modules: set[str]) -> Iterator[Import]:
    """All imports of `source`, which is `module`; `modules` are the names of all modules of zpccl."""
    tree = ast.parse(source, filename=module)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = {id(node) for function in ast.walk(tree) if isinstance(function, functions) for node in ast.walk(function)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            continue
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = sorted(set(from_targets(node, module, modules)))
        elif is_dynamic(node):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                targets = [first.value]
            else:
                targets = ["a name not known before it runs"]
        for target in targets:
            yield Import(public_name(module), node.lineno, target, id(node) in inner)


# --- The law ----------------------------------------------------------------------------------------------------------


def may_protocol(found: Import) -> bool:
    is_linear_algebra = found.module == "zpccl.protocol.packing" and top(found.target) == "numpy"
    return (
        top(found.target) in PURE | {"msgspec"} or is_linear_algebra or within(found.target, *VALUES, "zpccl.protocol")
    )


def may_values(found: Import) -> bool:
    lazily = found.local and top(found.target) in ("numpy", "torch")
    return top(found.target) in PURE or lazily or within(found.target, *VALUES)


def may_sim(found: Import) -> bool:
    if top(found.target) == "zpccl":
        return within(found.target, *VALUES, "zpccl.protocol", "zpccl.sim")
    # The command line measures its duration and may use several processes. The fake world may not.
    return is_standard(found.target) and (found.module == "zpccl.sim.__main__" or top(found.target) not in WORLD)


PUBLIC_API = ("zpccl.communicator", "zpccl.collectives", "zpccl.arguments", "zpccl.caller")
ABOVE_CONTROL = (*PUBLIC_API, "zpccl.master_node", "zpccl.cli", "zpccl.sim", "zpccl.torch")


def may_state(found: Import) -> bool:
    return not within(found.target, "zpccl.protocol", "zpccl.control", *ABOVE_CONTROL)


def may_engine(found: Import) -> bool:
    return may_state(found) and not within(found.target, "zpccl.state")


def may_control(found: Import) -> bool:
    return not within(found.target, *ABOVE_CONTROL)


LAYERS: dict[str, Callable[[Import], bool]] = {
    "zpccl.protocol": may_protocol,
    "zpccl.engine": may_engine,
    "zpccl.state": may_state,
    "zpccl.control": may_control,
    "zpccl.sim": may_sim,
    **dict.fromkeys(VALUES, may_values),
}
USERS_OF_COMMUNICATOR = ("zpccl.communicator", "zpccl.cli", "zpccl.torch")


def break_law(found: Import) -> Iterator[str]:
    """Why `found` violates the law; nothing if it does not."""
    for layer, may in LAYERS.items():
        if within(found.module, layer) and not may(found):
            yield f"{layer} must not import {found.target}"
    if within(found.target, NATIVE) and found.module != NATIVE_USER:
        yield f"only {NATIVE_USER} imports {NATIVE}"
    above = found.module == "zpccl" or within(found.module, *USERS_OF_COMMUNICATOR)
    if found.target in ("zpccl", "zpccl.communicator") and not above:
        yield f"{found.target} is above it"  # The package itself imports the communicator.
    if within(found.target, "zpccl.sim") and not within(found.module, "zpccl.sim"):
        yield "only the simulator imports the simulator"
    if within(found.target, "zpccl.torch") and not within(found.module, "zpccl.torch"):
        yield "zpccl.torch needs torch, and is imported by its users only"


def find_impure_calls(source: str) -> Iterator[tuple[int, str]]:
    """Lines of `source` that call a builtin which does I/O or differs between processes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            yield node.lineno, f"{node.func.id}() is not pure"


def check(sources: dict[str, str]) -> list[str]:
    """All violations in `sources`, as "module:line: why"."""
    modules = {public_name(module) for module in sources}
    violations = []
    for module, source in sources.items():
        for found in find_imports(module, source, modules):
            violations += [f"{found.module}:{found.line}: {why}" for why in break_law(found)]
        if within(module, "zpccl.protocol"):
            violations += [f"{module}:{line}: {why}" for line, why in find_impure_calls(source)]
    return violations


# --- Tests ------------------------------------------------------------------------------------------------------------


def test_sources_keep_the_law() -> None:
    assert check(load_sources(ROOT)) == []


def test_all_sources_are_seen() -> None:
    names = load_sources(ROOT).keys()
    assert {"zpccl.__init__", *VALUES} <= names
    assert any(within(name, "zpccl.protocol") for name in names)


TREE = dict.fromkeys(
    "zpccl.__init__ zpccl.errors zpccl.limits zpccl.types zpccl.communicator zpccl.collectives zpccl.arguments"
    " zpccl.caller zpccl.protocol.__init__ zpccl.protocol.master zpccl.protocol.packing"
    " zpccl.engine.__init__ zpccl.engine.engine zpccl.engine.tensors zpccl.state.__init__ zpccl.state.swarm"
    " zpccl.control.__init__ zpccl.control.loop"
    " zpccl.sim.__init__ zpccl.sim.__main__ zpccl.sim.cluster zpccl.cli.master"
    " zpccl.torch.__init__ zpccl.torch.backend".split(),
    "",
)

# Sources of each module, divided by "|".
LEGAL = {
    "zpccl.protocol.master": (
        "from __future__ import annotations|import collections.abc, hashlib, msgspec|"
        "from zpccl import errors, limits|from zpccl.errors import Kicked|from . import messages|"
        "self.open(1); message.id(2)"
    ),
    "zpccl.protocol.__init__": "from .master import Master",
    "zpccl.protocol.packing": "import numpy as np|from numpy.typing import NDArray",
    "zpccl.engine.engine": (
        "from zpccl.engine import _native|from zpccl.engine._native import ffi, lib|import threading, os"
    ),
    "zpccl.control.loop": "import zmq, time, zpccl.protocol.master, zpccl.engine.engine",
    "zpccl.sim.cluster": "import random, heapq; from zpccl.protocol.master import Master; from zpccl.sim import clock",
    "zpccl.state.swarm": "from zpccl.engine import tensors",
    "zpccl.sim.__main__": "import argparse, time",
    "zpccl.types": "def to_numpy():\n    import numpy as np",
    "zpccl.communicator": "from zpccl.control.loop import Loop",
    "zpccl.cli.master": "import zpccl",
    "zpccl.torch.backend": "import torch; from zpccl.communicator import Communicator; from zpccl import master_node",
    "zpccl.__init__": "from zpccl.communicator import Communicator",
}

ILLEGAL = {
    "zpccl.protocol.master": (
        "import time|import random|import os|import socket|import threading|import zmq|import asyncio|"
        "import select|import subprocess|import secrets|import numpy|import os.path|"
        "from time import monotonic_ns|def f():\n    import time|"
        "if TYPE_CHECKING:\n    from zpccl.control.loop import Loop|import zpccl.engine.engine|"
        "from zpccl import state|from .. import control|from ..control.loop import Loop|import importlib|"
        "__import__('time')|print(1)|open('f')|seed = hash('a')"
    ),
    "zpccl.protocol.__init__": "from ..control import loop",
    "zpccl.engine.tensors": (
        "import zpccl.protocol.master|from zpccl.control import loop|from zpccl.state import swarm|"
        "from zpccl import Communicator|from zpccl.engine import _native|from . import _native"
    ),
    "zpccl.state.swarm": ("from zpccl.control import loop|from zpccl.protocol import master"),
    "zpccl.engine.__init__": "from ._native import lib",
    "zpccl.control.loop": (
        "import zpccl.engine._native|importlib.import_module('zpccl.engine._native')|"
        "from zpccl.communicator import Communicator|from zpccl import collectives|from zpccl import arguments|"
        "from zpccl import caller|import zpccl|from zpccl.sim import cluster"
    ),
    "zpccl.sim.cluster": (
        "from zpccl.control import loop|import zpccl.engine.engine|import time|import zmq|import numpy"
    ),
    "zpccl.sim.__main__": "from zpccl import Communicator",
    "zpccl.communicator": "import zpccl.sim.cluster|from zpccl.torch import backend",
    "zpccl.cli.master": "import zpccl.torch.backend",
    "zpccl.types": "import numpy as np",
    "zpccl.errors": "from zpccl.protocol import master",
    "zpccl.limits": "import os",
}


def sources_of(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(module, source) for module, sources in table.items() for source in sources.split("|")]


@pytest.mark.parametrize(("module", "source"), sources_of(LEGAL))
def test_legal_source_passes(module: str, source: str) -> None:
    assert check({**TREE, module: source}) == []


@pytest.mark.parametrize(("module", "source"), sources_of(ILLEGAL))
def test_illegal_source_is_caught(module: str, source: str) -> None:
    violations = check({**TREE, module: source})
    assert violations
    assert all(violation.startswith(module.removesuffix(".__init__") + ":") for violation in violations)


def test_violation_names_the_line() -> None:
    assert check({**TREE, "zpccl.protocol.master": "import re\n\nimport time\n"}) == [
        "zpccl.protocol.master:3: zpccl.protocol must not import time"
    ]


def test_test_modules_import_no_other_one() -> None:
    """Code that several modules need is in a module without tests."""
    found = [
        f"{path.name}: {line}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.match(r"\s*(from \S*\btest_\w+ import|import \S*\btest_)", line)
    ]
    assert found == []
