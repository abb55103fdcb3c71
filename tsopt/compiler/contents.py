"""What containers, plain objects and random generators hold, taken down so that it can be put back."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
MOST = 2048  # values below the first ones that are looked at: what lies deeper belongs to more than the model
LEAVES = (str, bytes, int, float, complex, bool, type(None), torch.Tensor, nn.Module, type)
HEAP_TYPE = 1 << 9  # flag of classes that are made in Python


class Contents:
    """What is held by values, and by what these hold, however deep; modules and tensors are left out.

    Args:
        values: where to begin.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._held: list[tuple[Any, Any]] = []
        self._states: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []
        seen: set[int] = set()
        todo = deque(values)
        end = len(todo) + MOST
        while todo and len(seen) < end:
            value = todo.popleft()
            if id(value) in seen or isinstance(value, LEAVES):
                continue
            seen.add(id(value))
            if type(value) in CONTAINERS:
                self._held.append((value, value.copy()))
                todo.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, tuple):
                todo.extend(value)
            elif (state := _state_of(value)) is not None:
                self._states.append((*state, state[1]()))
            elif is_plain(value):
                namespace = vars(value)
                self._held.append((namespace, namespace.copy()))
                todo.extend(namespace.values())

    def are_same(self) -> bool:
        """Whether nothing has changed."""
        held = all(_same(held, content) for held, content in self._held)
        return held and all(_same_state(now(), state) for _, now, state in self._states)

    def put_back(self, *, but: Iterable[int] = (), only_tensors: bool = False) -> bool:
        """Restores what is another than it was, and touches nothing else: other threads may be looking.

        Args:
            but: ids of containers that stay as they are.
            only_tensors: leave all changes that have not brought a tensor.

        Returns:
            Whether anything was.
        """
        left, changed = set(but), False
        for held, content in self._held:
            if id(held) not in left and not _same(held, content):
                changed |= _restore(held, content, only_tensors)
        for set_state, state_now, state in self._states:
            if not _same_state(state_now(), state):
                set_state(state)
                changed = True
        return changed


def is_plain(value: Any) -> bool:
    """Whether it is an object of a class made in Python, all of whose state is in its attributes."""
    cls = type(value)
    return (
        bool(cls.__flags__ & HEAP_TYPE)
        and type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, (nn.Module, torch.Tensor, type))
        and cls.__module__.partition(".")[0] != "torch"
    )


def holds_tensor(value: Any, depth: int = 3) -> bool:
    """Whether it is a tensor, or a container with one in it, or in one of its containers, so many levels deep."""
    if isinstance(value, (list, tuple, set, deque, dict)) and depth:
        return any(holds_tensor(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor)


def _state_of(value: Any) -> tuple[Callable[[Any], object], Callable[[], Any]] | None:
    """How the state of a random generator is set and read; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.set_state, value.get_state
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return value.setstate, value.getstate
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return lambda state: setattr(bits, "state", state), lambda: bits.state
    return None


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same_state, a, b))
    return bool(np.array_equal(a, b))


def _same(held: Any, content: Any) -> bool:
    """Whether a container holds the very same objects, in the same order."""
    if len(held) != len(content):
        return False
    if isinstance(held, dict):
        pairs = zip(held.items(), content.items(), strict=True)
        return all(a is b and key is other for (key, a), (other, b) in pairs)
    return held == content if isinstance(held, set) else all(a is b for a, b in zip(held, content, strict=True))


def _restore(held: Any, content: Any, only_tensors: bool) -> bool:
    """Puts back what was in a container. Returns whether it has done anything."""
    if isinstance(held, dict):
        new = [key for key, value in held.items() if content.get(key, held) is not value]
        gone = [] if only_tensors else [key for key in content if key not in held]
        wrong = [key for key in new if not only_tensors or holds_tensor(held[key])]
        for key in wrong:
            if key in content:
                held[key] = content[key]
            else:
                del held[key]
        for key in gone:
            held[key] = content[key]
        if not only_tensors and [*held] != [*content]:  # the order is part of it
            held.clear()
            held.update(content)
        return bool(wrong or gone) or not only_tensors
    kept = content
    if only_tensors:
        known = set(map(id, content))
        kept = [value for value in held if id(value) in known or not holds_tensor(value)]
        if len(kept) == len(held):
            return False
    if isinstance(held, list):
        held[:] = kept
    else:
        held.clear()
        held.update(kept) if isinstance(held, set) else held.extend(kept)
    return True
