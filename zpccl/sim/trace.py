"""Formats a trace: one line per event and effect, with the simulated time."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from zpccl.limits import SECOND


def describe(value: object, name_of: Callable[[bytes], str]) -> str:
    """A value as short text, with peer ids replaced by `name_of`."""
    if isinstance(value, bytes):
        return name_of(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(describe(item, name_of) for item in value) + "]"
    if isinstance(value, BaseException):
        return f"{type(value).__name__}({value})"
    names = getattr(value, "__struct_fields__", None)  # It is a message.
    if names is not None:
        fields = [(name, getattr(value, name)) for name in names]
    elif dataclasses.is_dataclass(value):
        fields = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return str(value)
    texts = (f"{name}={describe(item, name_of)}" for name, item in fields if name not in ("token", "addresses"))
    return f"{type(value).__name__}({', '.join(texts)})"


def line(now_ns: int, actor: str, arrow: str, text: str) -> str:
    """One line of a trace."""
    return f"{now_ns / SECOND:12.6f} {actor:>8} {arrow} {text}"
