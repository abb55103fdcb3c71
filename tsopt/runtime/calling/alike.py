"""Whether code that computes with one value computes the same with another one."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_, itemgetter
from types import BuiltinFunctionType, CodeType, MethodType
from typing import Any

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import elements_of, in_slots, is_python, items_of
from tsopt.compiler.tensor_bytes import same_bytes

LEVELS = 4  # of attributes of attributes that are compared
# What is equal to one of these is alike; so it is where equality is that of `object`.
EXACT = (str, bytes, CodeType, MethodType, BuiltinFunctionType)


class Kept:
    """Values as they are now, compared with others at every call.

    A comparison of lists passes over what is identical in no time. Beyond it, only those are looked at one by one to
    which something else may be equal that is not alike.
    """

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        loose = [place for place, value in enumerate(values) if not _is_exact(value)]
        self._of: Callable[[Any], tuple[Any, ...]] = itemgetter(*loose, *loose[-1:]) if loose else lambda _: ()
        self._loose = self._of(values)

    def alike(self, values: list[Any]) -> bool:
        """Whether each is alike to the one before. May raise if one is not."""
        same = values == self.values and all(map(is_, self._of(values), self._loose))
        return same or all_alike(values, self.values)


def _is_exact(value: Any) -> bool:
    cls = type(value)
    if cls in (torch.Tensor, torch.nn.Parameter):
        return value.layout == torch.strided and value.numel() != 1  # the truth of several equalities is an error
    equals: Any = cls.__eq__
    return equals is object.__eq__ or cls in EXACT


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


def resembles(value: Any, before: Any, levels: int = LEVELS) -> bool:
    """Whether two objects are alike, or are of one class and their attributes are: an equal copy counts as the same."""
    if alike(value, before):
        return True
    if type(value) is not type(before) or isinstance(value, (torch.Tensor, nn.Module)) or not levels:
        return False
    if isinstance(value, (tuple, list)):
        pairs = [*zip(elements_of(value), elements_of(before), strict=False)]
        return len(value) == len(before) and all(resembles(*pair, levels - 1) for pair in pairs)
    if not isinstance(value, dict):
        cls: Any = type(value)
        if not is_python(cls) or not hasattr(value, "__dict__"):
            return False
        value, before = (vars(item) | in_slots(item) for item in (value, before))
    mine, theirs = items_of(value), items_of(before)
    return mine.keys() == theirs.keys() and all(resembles(mine[key], theirs[key], levels - 1) for key in mine)


def differ(tensor: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors differ in their type or their values."""
    same_kind = (tensor.shape, tensor.dtype, tensor.device) == (before.shape, before.dtype, before.device)
    return not same_kind or not same_bytes(tensor, before)
