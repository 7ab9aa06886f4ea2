"""A fault in one function: an expression or a statement of it replaced by another, in its source or in this process."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from common import WorkerFailed

SIMULATOR = "simulator"
TESTS = "unit tests"


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what the code does with it.
        function: what it is in: the module below zpccl, a colon, and the qualified name.
        old: the expression or statement to replace; the function has it exactly once, in whatever layout.
        new: what stands there instead: an expression, or statements.
        breaks: the promise that it breaks (ARCHITECTURE.md), and how.
        finder: who is expected to catch it: SIMULATOR, or TESTS where it takes a case that the simulator does not make.
    """

    name: str
    function: str
    old: str
    new: str
    breaks: str
    finder: str = SIMULATOR

    @property
    def module(self) -> str:
        """The name of the module."""
        return f"zpccl.{self.function.partition(':')[0]}"

    @property
    def path(self) -> Path:
        """The file of the module, below the root."""
        return Path(*self.module.split(".")).with_suffix(".py")

    @property
    def names(self) -> list[str]:
        """Those that lead from the module to the function."""
        return self.function.partition(":")[2].split(".")


class NoSuchCode(WorkerFailed):
    """A mutant does not go with the source."""


def mutate(mutant: Mutant, source: str) -> tuple[ast.Module, int]:
    """The module of a mutant with its fault, and the line where that is.

    Raises:
        NoSuchCode: there is no such function, or `old` is not exactly once in it.
    """
    tree = ast.parse(source)
    (wanted,), put = ast.parse(mutant.old).body, ast.parse(mutant.new).body
    old: ast.stmt | ast.expr = wanted
    new: Sequence[ast.stmt | ast.expr] = put
    if isinstance(wanted, ast.Expr) and isinstance(put[0], ast.Expr):
        old, new = wanted.value, [put[0].value]
    text = ast.dump(old)
    places = [
        (parent, field, node)
        for parent in ast.walk(_find(mutant, tree))
        for field, value in ast.iter_fields(parent)
        for node in (value if isinstance(value, list) else [value])
        if isinstance(node, type(old)) and ast.dump(node) == text
    ]
    if len(places) != 1:
        raise NoSuchCode(f"{mutant.name}: {mutant.old!r} is {len(places)} times in {mutant.function}, not once")
    ((parent, field, node),) = places
    for added in new:
        for inner in ast.walk(added):
            ast.copy_location(inner, node)
    value = getattr(parent, field)
    if isinstance(value, list):
        place = value.index(node)
        value[place : place + 1] = new
    else:
        setattr(parent, field, new[0])
    return tree, node.lineno


def _find(mutant: Mutant, tree: ast.Module) -> ast.AST:
    found: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for name in mutant.names:
        inner = (node for node in found.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
        if (one := next(inner, None)) is None:
            raise NoSuchCode(f"{mutant.name}: there is no {mutant.function}")
        found = one
    return found


def loaded(mutant: Mutant) -> tuple[FunctionType, CodeType]:
    """The function of a mutant in this process, and its code with the fault: assign that to its `__code__`.

    Raises:
        NoSuchCode: the mutant does not go with the source.
    """
    module = importlib.import_module(mutant.module)
    code = compile(mutate(mutant, inspect.getsource(module))[0], str(module.__file__), "exec", dont_inherit=True)
    function: Any = module
    for name in mutant.names:
        function = inspect.getattr_static(function, name)
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    function = getattr(function, "__func__", getattr(function, "fget", function))  # Of a static method, of a property.
    assert isinstance(function, FunctionType)
    return function, code
