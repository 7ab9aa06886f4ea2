"""The description of a scenario: its arguments, its measurement, and the columns of its tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from common import Row, Rows, format_bytes, print_table


class Column(NamedTuple):
    """One column: its title, the key in a row, and the format specification of value x factor (not of "bytes")."""

    title: str
    key: str
    form: str = ""
    factor: float = 1

    def cell(self, row: Row) -> str:
        """The value of a row as text."""
        value = row.get(self.key)
        if value is None:
            return "-"
        if self.key == "bytes":
            return format_bytes(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return format(value if self.factor == 1 else value * self.factor, self.form)


def plain(*keys: str) -> list[Column]:
    """Columns of values as they are, under their keys."""
    return [Column(key, key) for key in keys]


def times(name: str, form: str = ".3f", unit: str = "ms", title: str = "") -> list[Column]:
    """Columns for median, minimum and maximum of `name`, which is in seconds, in ms or in s."""
    factor = {"ms": 1e3, "s": 1.0}[unit]
    return [Column(f"{title}{what} {unit}", f"{name}_{what}", form, factor) for what in ("median", "min", "max")]


@dataclass(frozen=True)
class Scenario:
    """One scenario.

    `measure` yields one row per result. If promises were checked a row has "problems": texts that name broken promises.
    """

    text: str | None
    """Description of the measurement, for --help."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Rows]
    title: str
    """Of the table. It may contain options: "{options.peers} peers"."""
    columns: Sequence[Column] = ()
    """Empty: each row is printed as a table of its own."""
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] | None = None
    """Completes the options, or exits with an error message."""

    def line_of(self, row: Row) -> str:
        """A row as one line."""
        return "  ".join(f"{column.title} {column.cell(row)}" for column in self._columns_of(row))

    def print_tables(self, options: argparse.Namespace, rows: Sequence[Row]) -> None:
        """Prints all rows."""
        title = self.title.format(options=options)
        if self.columns:
            cells = [[column.cell(row) for column in self.columns] for row in rows]
            print_table(title, [column.title for column in self.columns], cells)
        else:
            for row in rows:
                print_table(title, ["what", "value"], [[one.title, one.cell(row)] for one in self._columns_of(row)])

    def _columns_of(self, row: Row) -> Sequence[Column]:
        return self.columns or [
            Column(key, key, ".2f" if isinstance(value, float) else "")
            for key, value in row.items()
            if not isinstance(value, list)
        ]
