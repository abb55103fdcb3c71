"""Specializations: what was compiled for further signatures, and the keys by which calls find it."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tsopt.compiler.calls.memory import overlaps
from tsopt.compiler.calls.structure import Structure, flatten
from tsopt.compiler.calls.types import TensorType, unlike_a_tensor

MAX_SPECIALIZATIONS = 16  # kept at a time: those that were called last

CallKey = tuple[Structure, tuple[Any, ...]]  # equal for calls that one specialization can serve


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], *, aliasing: bool = False) -> CallKey:
    """The structure and tensor types of a call: equal for calls that one specialization can serve.

    Args:
        aliasing: calls whose tensors share memory in different ways get different keys.
    """
    leaves, structure = flatten((args, kwargs))
    shared = overlaps(leaves) if aliasing and not any(map(unlike_a_tensor, leaves)) else ()
    return structure, (*map(_kind, leaves), *shared)


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or unlike_a_tensor(leaf) is not None:
        return type(leaf), str(getattr(leaf, "layout", ""))
    return TensorType.of(leaf)


class Specializations:
    """An LRU cache of compiled forms, or of eager, by the key of the calls that they serve."""

    def __init__(self) -> None:
        self._kept: OrderedDict[CallKey, Callable[..., Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: CallKey) -> Callable[..., Any] | None:
        """Raises TypeError for a call with a constant that cannot be hashed, which cannot be recognized again."""
        found = self._kept.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread may just have evicted it
                self._kept.move_to_end(key)
        return found

    def keep(self, key: CallKey, made: Callable[..., Any]) -> None:
        if len(self._kept) >= MAX_SPECIALIZATIONS:
            self._kept.popitem(last=False)
        self._kept[key] = made
