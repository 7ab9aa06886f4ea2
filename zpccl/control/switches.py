"""Switches that the user sets by a keyword, or by an environment variable if the keyword is left out."""

from __future__ import annotations

import os

from zpccl.errors import InvalidArgument

_WORDS = {"1": True, "true": True, "0": False, "false": False, "": None}


def read_switch(value: bool | None, name: str) -> tuple[bool | None, str]:
    """Whether a switch is on, None if it is not set; and the name of its source, for error messages.

    Args:
        value: value of the keyword.
        name: the keyword. The variable has the same name, in capitals, after ZPCCL_.

    Raises:
        InvalidArgument: the keyword is not a bool, or the variable is not 1, 0, true, false or empty.
    """
    variable = f"ZPCCL_{name.upper()}"
    if value is None and variable in os.environ:
        text = os.environ[variable]
        if text.lower() not in _WORDS:
            raise InvalidArgument(f"{variable} is {text!r}; set it to 1 or 0")
        return _WORDS[text.lower()], variable
    if not (value is None or isinstance(value, bool)):
        raise InvalidArgument(f"{name}={value!r} is not True, False or None")
    return value, f"{name}="
