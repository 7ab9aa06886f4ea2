"""Tensors that say that they are on a GPU, which this machine need not have. The fixture `gpu` has their device."""

from __future__ import annotations

from typing import Any

import torch


class OnGpu(torch.Tensor):  # type: ignore[misc]
    """Its memory is the host's. What torch makes of such tensors is on the GPU, too."""

    @property
    def device(self) -> Any:
        return torch.device("cuda:0")


def on_gpu(values: Any, dtype: Any = None) -> Any:
    """A tensor there with these values."""
    return torch.as_tensor(values, dtype=dtype).as_subclass(OnGpu)


def on_cpu(tensor: Any) -> Any:
    """What is there now."""
    assert isinstance(tensor, OnGpu)
    return tensor.as_subclass(torch.Tensor)
