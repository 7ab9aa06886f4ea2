"""Logging: the logger "zpccl" of the standard `logging` package, and a handler for programs that set up none."""

from __future__ import annotations

import logging
import os
import warnings

LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr(level: str) -> None:
    """Logs messages of all zpccl loggers at `level` or above to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("zpccl")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def log_as_environment_says() -> None:
    """Logs to standard error if ZPCCL_LOG_LEVEL is set, else leaves logging to the program."""
    logging.getLogger("zpccl").addHandler(logging.NullHandler())
    level = os.environ.get("ZPCCL_LOG_LEVEL", "").lower()
    if level in LEVELS:
        log_to_stderr(level)
    elif level:
        text = f"ZPCCL_LOG_LEVEL is {level!r}, not one of {', '.join(LEVELS)}; zpccl logs nothing by itself"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
