"""The values of a tensor as bytes."""

from __future__ import annotations

import torch


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as u8[n], without a copy."""
    # NOTE: one element is contiguous with any stride, which `contiguous` and `reshape` keep; a view as bytes wants 1.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the values of two tensors of one type are the same to the bit, NaN included."""
    plain = (t.detach().resolve_conj().resolve_neg().contiguous() for t in (a, b))
    return torch.equal(*map(bytes_in, plain))
