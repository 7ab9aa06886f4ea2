"""CUDA support, with PCCL's name: zpccl reduces and synchronises tensors on a GPU like tensors on the CPU."""

from __future__ import annotations

import sys


def is_available() -> bool:
    """True if torch is imported and has a GPU."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_available())
