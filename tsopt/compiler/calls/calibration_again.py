"""Calibration data that can be read once, for several runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch

from tsopt.compiler.calls.calibration_kept import MOST
from tsopt.compiler.calls.structure import flatten, unflatten
from tsopt.compiler.random_state import random_state_kept


def readable_again(data: Any) -> Any:
    """Calibration data for several runs: copies of an iterator's items; anything else as it is."""
    if not isinstance(data, Iterator):
        return data
    with random_state_kept():
        return [owned(item) for item in itertools.islice(data, MOST)]


def owned(value: Any) -> Any:
    """A nesting of tensors and arrays with the same values in memory of its own."""
    leaves, structure = flatten(value)
    return unflatten(structure, [_copy_of(leaf) for leaf in leaves])


def _copy_of(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy(leaf)
