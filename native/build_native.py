"""Builds `zpccl.engine._native` with cffi from the C files beside this one and zp_api.h.

`ZPCCL_CFLAGS` in the environment is appended to the compiler's and the linker's arguments: "-Werror", sanitizers, ...
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent
# setuptools wants paths relative to where setup.py runs, so that they work from an unpacked sdist.
SOURCES = sorted(os.path.relpath(path) for path in NATIVE.glob("*.c"))
HEADERS = sorted(os.path.relpath(path) for path in NATIVE.glob("*.h"))

# -UNDEBUG: Python's own flags switch assertions off. -ffp-contract=off: no fused multiply-add, so that every
# instruction set gives the same bits. The next two let loops with comparisons vectorise and change no value.
COMPILE_ARGS = [
    "-O3",
    "-std=gnu11",
    "-UNDEBUG",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wshadow",
]
# Not -I: the C library has a link.h and a memory.h too.
INCLUDE_ARGS = ["-iquote", os.path.relpath(NATIVE)]


def declarations() -> str:
    """The contents of zp_api.h that cffi understands: without includes and conditionals; numeric defines stay."""
    text = (NATIVE / "zp_api.h").read_text(encoding="ascii")
    return re.sub(r"^#(include|ifndef|endif|define ZP_API_H).*$", "", text, flags=re.MULTILINE)


def make_builder() -> FFI:
    """The builder that setuptools finds by `cffi_modules`."""
    extra = shlex.split(os.environ.get("ZPCCL_CFLAGS", ""))
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        "zpccl.engine._native",
        '#include "zp_api.h"\n',
        sources=SOURCES,
        depends=HEADERS,
        extra_compile_args=[*COMPILE_ARGS, *INCLUDE_ARGS, *extra],
        extra_link_args=["-pthread", *extra],
        libraries=["m"],
        py_limited_api=True,
    )
    return builder


ffibuilder = make_builder()

if __name__ == "__main__":
    ffibuilder.compile(tmpdir=".", verbose=True)
