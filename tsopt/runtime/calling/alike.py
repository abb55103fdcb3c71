"""Whether code that computes with one value computes the same with another one."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch

from tsopt.compiler.calls.snapshot import elements_of, items_of
from tsopt.compiler.protect import same_bytes


def all_alike(values: list[Any], before: list[Any]) -> bool:
    """Whether each value is alike to the one before."""
    return len(values) == len(before) and (all(map(is_, values, before)) or all(map(alike, values, before)))


def alike(value: Any, before: Any) -> bool:
    """Whether code that computes with one computes the same with the other; 1, 1.0 and True are not alike."""
    if value is before:
        return True
    if type(value) is not type(before) or isinstance(value, torch.Tensor):  # a tensor has a place, and may be written
        return False
    if isinstance(value, (tuple, list)):
        return all_alike(elements_of(value), elements_of(before))
    if isinstance(value, dict):
        mine, theirs = items_of(value), items_of(before)
        return all_alike([*mine], [*theirs]) and all_alike([*mine.values()], [*theirs.values()])
    if isinstance(value, (float, complex)):
        return repr(value) == repr(before)  # 0.0 and -0.0 are not alike, NaN and NaN are
    try:
        return bool(value == before)
    except Exception:  # of arrays, whose comparison is one for each element
        return False


def differ(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors differ in their type or their values."""
    same_kind = (tensor.shape, tensor.dtype, tensor.device) == (before.shape, before.dtype, before.device)
    return not same_kind or not same_bytes(tensor, before)
