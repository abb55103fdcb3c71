"""Floats of one byte: torch stores and converts them, and computes with hardly any."""

from __future__ import annotations

import torch


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in float32, which has all of theirs; a tensor of any other dtype as it is."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor
