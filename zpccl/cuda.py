"""CUDA support, for programs written for PCCL: collectives take CPU tensors only, shared state may be on a GPU."""

from __future__ import annotations


def is_available() -> bool:
    """False: collectives of CUDA tensors are not supported yet. Use `tensor.cpu()`."""
    return False
