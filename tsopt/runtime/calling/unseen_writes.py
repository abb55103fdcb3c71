"""Writes to weights that leave their version counters as they are: who watches weights is told of those made here.

Optimizers: the fused ones of torch, kernels of other libraries, and those that write through `.data`. One hook for the
whole process, registered when the first weights are watched, runs after each `step()`. It costs less than a microsecond
for each parameter, and only reads: a raised counter would make autograd refuse graphs that it accepts otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import register_optimizer_step_post_hook

from tsopt.compiler import forks


class Watcher(Protocol):
    """An object that relies on the version counters of tensors."""

    def was_written(self, places: frozenset[int]) -> None:
        """Told after a write to the memory at these places; see `place_of`."""


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()
_lock = forks.Lock()
_hooks: list[Any] = []


def tell(watcher: Watcher) -> None:
    """Tells it from now on, for as long as it exists."""
    with _lock.held():
        _watchers.add(watcher)
        if not _hooks:
            # NOTE: in a compiled step, which torch itself breaks around fused kernels, it is called all the same.
            # Not torch.compiler.disable, which imports the compiler (0.5 s) before anybody makes a step.
            _hooks.append(register_optimizer_step_post_hook(_disable_dynamo(_after_step)))


def written(tensors: Iterable[torch.Tensor]) -> None:
    """Tells everybody who watches any of these."""
    with _lock.held():
        watchers = [*_watchers]
    places = frozenset(map(place_of, tensors)) if watchers else frozenset()
    for watcher in watchers:
        watcher.was_written(places)


def place_of(tensor: torch.Tensor) -> int:
    """The address of its storage, or its identity if it has none, so that views of it are not recognized then."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    # A sparse tensor or one of torch.func, a parameter that is not initialized yet, a storage that torch invalidated.
    except (NotImplementedError, RuntimeError, ValueError):
        return id(tensor)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    written(p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
