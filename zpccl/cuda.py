"""CUDA support, for programs written for PCCL: this version takes CPU tensors only."""

from __future__ import annotations


def is_available() -> bool:
    """False: CUDA tensors are not supported yet. Use `tensor.cpu()`."""
    return False
