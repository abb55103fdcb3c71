"""No weak references to tensors, which `torch.utils.swap_tensors` refuses: when one ends, and what tracers leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

LIFE = "_tsopt_life"  # attribute of a tensor


def life_of(tensor: torch.Tensor) -> set[Any]:
    """What is there for as long as a tensor is, or until it is swapped with another one.

    An empty set, which anybody can load that the tensor is saved for. That of a copy is the copy's own.
    """
    found: set[Any] = tensor.__dict__.setdefault(LIFE, set())
    return found


def let_go(mode: FakeTensorMode) -> None:
    """Drops the weak references of a mode to the tensors that it has made fakes of: torch keeps some modes for good."""
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


@contextmanager
def letting_go(mode: FakeTensorMode) -> Iterator[None]:
    """A block after which the mode has none."""
    try:
        yield
    finally:
        let_go(mode)
