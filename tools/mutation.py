"""A fault in one function: one of its expressions or statements is replaced, in the source or in this process."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from common import WorkerFailed

SIMULATOR = "simulator"
TESTS = "unit tests"
_MUTANT = re.compile(
    r"^(?P<name>\S+): (?P<function>\S+) \((?P<finder>simulator|unit tests)\)\n"
    r"  (?P<breaks>.+)\n  - (?P<old>.+)\n  \+ (?P<new>.+)\n",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: describes the wrong behaviour.
        function: the module below zpccl, a colon, and the qualified name of the function.
        old: the expression or statement to replace; it occurs exactly once in the function; layout does not matter.
        new: its replacement: an expression, or statements.
        breaks: the promise that it breaks (ARCHITECTURE.md), and how.
        finder: the check that is expected to catch it: SIMULATOR, or TESTS if the simulator does not reach the case.
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
        """The parts of the function's qualified name."""
        return self.function.partition(":")[2].split(".")


def parse_mutants(text: str) -> tuple[Mutant, ...]:
    """The mutants of a text of four lines each (mutants.py); a line that begins with # is a heading.

    Raises:
        ValueError: some lines are no mutant.
    """
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    if rest := _MUTANT.sub("", text).strip():
        raise ValueError(f"no mutant: {rest.splitlines()[0]!r}")
    return tuple(Mutant(**found.groupdict()) for found in _MUTANT.finditer(text))


class NoSuchCode(WorkerFailed):
    """A mutant does not match the source."""


def mutate(mutant: Mutant, source: str) -> tuple[ast.Module, int]:
    """The syntax tree of the module with the fault, and the line of the fault.

    Raises:
        NoSuchCode: there is no such function, or `old` does not occur exactly once in it.
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
    """The function of a mutant in this process, and its code with the fault, to be assigned to its `__code__`.

    Raises:
        NoSuchCode: the mutant does not match the source.
    """
    module = importlib.import_module(mutant.module)
    code = compile(mutate(mutant, inspect.getsource(module))[0], str(module.__file__), "exec", dont_inherit=True)
    function: Any = module
    for name in mutant.names:
        function = inspect.getattr_static(function, name)
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    function = getattr(function, "__func__", getattr(function, "fget", function))  # A static method or a property.
    assert isinstance(function, FunctionType)
    return function, code
