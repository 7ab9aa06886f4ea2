"""Tensors that claim to be on a GPU, which this machine need not have. The fixture `gpu` has their device."""

from __future__ import annotations

from typing import Any

import torch


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """A tensor in host memory. The tensors that torch makes from it also claim to be on the GPU."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")


def on_gpu(values: Any, dtype: Any = None) -> Any:
    """A tensor on the GPU with these values."""
    return torch.as_tensor(values, dtype=dtype).as_subclass(OnGpu)


def on_cpu(tensor: Any) -> Any:
    """The present contents of such a tensor."""
    assert isinstance(tensor, OnGpu)
    return tensor.as_subclass(torch.Tensor)
