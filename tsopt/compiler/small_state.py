"""Tensors and arrays that calls may use as state without registering them: taken down, and put back."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from tsopt.compiler.tensor_bytes import same_bytes

LARGEST = 1 << 24  # bytes of a tensor in a plain attribute, a list or a closure that may be state
USUAL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}) | frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether it is a dense tensor with values."""
    lazy = isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))
    return not lazy and tensor.layout == torch.strided and tensor.device.type != "meta"


def is_small_state(value: object) -> bool:
    """Whether a value is a tensor that a call might use as state without registering it as a buffer.

    Large tensors are taken for weights. Unusual ones, such as quantized tensors, cannot be compared or restored byte by
    byte.
    """
    if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return False
    tensor: Any = value
    if not has_values(tensor) or tensor.is_quantized or tensor.is_nested or tensor.dtype not in USUAL:
        return False
    fits = 0 < tensor.nbytes <= min(LARGEST, tensor.untyped_storage().nbytes())
    return fits and all(stride or size <= 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


class Values:
    """What small tensors and arrays held when they were added, up to LARGEST bytes together."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, Any]] = []  # each with a copy
        self._left = LARGEST

    def add(self, value: Any) -> None:
        """Takes down what a value holds, if it is one of these."""
        if is_small_state(value):
            held, before = value.detach(), value.detach().clone
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            held, before = value, value.copy
        else:
            return
        if held.nbytes <= self._left:
            self._left -= held.nbytes
            self._kept.append((held, before()))

    def are_same(self) -> bool:
        return all(itertools.starmap(_is_same, self._kept))

    def put_back(self) -> bool:
        """Restores what has changed, and writes to nothing else. Returns whether anything was."""
        changed = [(held, before) for held, before in self._kept if not _is_same(held, before)]
        for held, before in changed:
            if isinstance(held, torch.Tensor):
                with torch.inference_mode(held.is_inference()), torch.no_grad():
                    held.copy_(before)
            elif held.flags.writeable:
                held[...] = before
        return bool(changed)


def _is_same(held: Any, before: Any) -> bool:
    """Whether the values are the same to the bit."""
    return same_bytes(held, before) if isinstance(held, torch.Tensor) else bool(held.tobytes() == before.tobytes())
