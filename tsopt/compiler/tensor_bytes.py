"""The values of a tensor as bytes."""

from __future__ import annotations

import torch


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as u8[n], without a copy."""
    # NOTE: one element is contiguous with any stride, which `contiguous` and `reshape` keep; a view as bytes wants 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
