"""CUDA support, named as in PCCL: tensors on a GPU are reduced and synchronised like those on the CPU."""

from __future__ import annotations

import sys


def is_available() -> bool:
    """True if torch is imported and has a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())
