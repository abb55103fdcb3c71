"""What containers, plain objects and random generators hold, taken down so that it can be put back."""

from __future__ import annotations

import functools
import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import PurePath
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from tsopt.compiler.calls.snapshot import dict_class, elements_of, items_of
from tsopt.compiler.small_state import Values

CONTAINERS = (dict, list, set, deque)  # and subclasses, which may override any method: those of these are called
MOST = 2048  # values below the first ones that are looked at: what lies deeper belongs to more than the model
LEAVES: tuple[Any, ...] = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.Tensor,
    nn.Module,
    ModuleType,
    type,
    *weakref.ProxyTypes,
)
VALUES = (torch.Tensor, np.ndarray)
HEAP_TYPE = 1 << 9  # flag of classes that are made in Python


class Contents:
    """What is held by values, and by what these hold, however deep; modules and large tensors are left out.

    Args:
        values: where to begin.
        of_process: ids of further containers to leave out; see `process_wide`, which says what is left out in any case.
    """

    def __init__(self, values: Iterable[Any], of_process: Iterable[int] = ()) -> None:
        self._held: list[tuple[Any, Any, bool]] = []  # with whether it belongs to an object
        self._states: list[tuple[Callable[[Any], object], Callable[[], Any], Any]] = []
        self._values = Values()
        known = {*of_process, *process_wide()}
        seen: set[int] = set()
        todo = deque((value, False) for value in values)
        end = len(todo) + MOST
        while todo and len(seen) < end:
            value, of_object = todo.popleft()
            kind = type(value)  # no proxy is asked what it stands for
            is_value = issubclass(kind, VALUES)
            if id(value) in seen or (issubclass(kind, LEAVES) and not is_value):
                continue
            seen.add(id(value))
            if is_value:
                self._values.add(value)
                continue
            if issubclass(kind, CONTAINERS):
                if id(value) in known:
                    continue
                content = _content(value)
                self._held.append((value, content, of_object))
                inner = content.values() if isinstance(content, dict) else content
                todo.extend((item, of_object) for item in inner)
            if issubclass(kind, tuple):
                todo.extend((item, of_object) for item in elements_of(value))
            elif (state := _state_of(value)) is not None:
                self._states.append((*state, state[1]()))
            elif is_plain(value):
                namespace = vars(value)
                self._held.append((namespace, namespace.copy(), True))
                todo.extend((item, True) for item in namespace.values())

    def are_same(self) -> bool:
        """Whether nothing has changed."""
        held = all(_same(held, content) for held, content, _ in self._held)
        same = held and all(same_state(now(), state) for _, now, state in self._states)
        return same and self._values.are_same()

    def put_back_values(self) -> None:
        """Restores the values of small tensors and arrays, and nothing else."""
        self._values.put_back()

    def put_back(self, *, but: Iterable[int] = (), only_tensors: Literal["objects", "all", ""] = "") -> bool:
        """Restores what has changed, and touches nothing else: other threads may be looking.

        Args:
            but: ids of containers that stay as they are.
            only_tensors: leave all changes that have not brought a tensor, for they may be another thread's:
                those of plain objects, or all.

        Returns:
            Whether anything was.
        """
        left, changed = set(but), False
        for held, content, of_object in self._held:
            if id(held) not in left and not _same(held, content):
                changed |= _restore(held, content, only_tensors == "all" or (of_object and bool(only_tensors)))
        for set_state, state_now, state in self._states:
            if not same_state(state_now(), state):
                set_state(state)
                changed = True
        return (not only_tensors and self._values.put_back()) or changed


def is_plain(value: Any) -> bool:
    """Whether it is an object of a class made in Python, and not of a library's: locks and queues must not go back."""
    cls = type(value)
    if cls is SimpleNamespace:
        return True
    has_namespace = bool(cls.__flags__ & HEAP_TYPE) and bool(cls.__dictoffset__)
    return has_namespace and not is_library(cls.__module__) and type(vars(value)) is dict


def process_wide(places: Iterable[tuple[Mapping[str, Any], str]] = ()) -> set[int]:
    """The ids of what Python or torch holds for the whole process, as `sys.modules`: it grows whatever a model does.

    Args:
        places: namespaces and names that code reads from them. What a library's namespace holds belongs to the library.
    """
    theirs = [at[name] for at, name in places if name in at and is_library(at.get("__name__"))]
    return {id(value) for value in (*theirs, *vars(sys).values())}


def behind_proxy(value: Any) -> Any:
    """The dict that a read-only view of one (`types.MappingProxyType`) shows; anything else is itself."""
    return gc.get_referents(value)[0] if type(value) is MappingProxyType else value


def package_of(module: Any) -> str:
    """The outermost package of a module, by the module's name: a class may say anything of its own."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_library(module: Any) -> bool:
    """Whether a class or function, by its `__module__`, comes with torch, with Python, or with tsopt."""
    package = package_of(module)
    return package in ("torch", "tsopt") or package in sys.stdlib_module_names


def is_installed(module: Any) -> bool:
    """Whether it comes with an installed package."""
    return _is_installed(package_of(module))


@functools.lru_cache(maxsize=1024)
def _is_installed(package: str) -> bool:
    found = sys.modules.get(package)
    file = getattr(found, "__file__", None) or next(iter(getattr(found, "__path__", None) or ()), None)
    return isinstance(file, str) and not {"site-packages", "dist-packages"}.isdisjoint(PurePath(file).parts)


def holds_tensor(value: Any, depth: int = 3) -> bool:
    """Whether it is a tensor, or a container with one in it, or in one of its containers, so many levels deep."""
    if isinstance(value, (list, tuple, set, deque, dict)) and depth:
        items = items_of(value).values() if isinstance(value, dict) else elements_of(value)
        return any(holds_tensor(item, depth - 1) for item in items)
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


def same_state(a: Any, b: Any) -> bool:
    """Whether two states of a random generator are the same."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(same_state(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(same_state, a, b))
    return bool(np.array_equal(a, b))


def _content(held: Any) -> Any:
    """A plain copy of a container, made in one step: other threads may change it."""
    if isinstance(held, dict):
        return items_of(held)
    return set().union(held) if isinstance(held, set) else elements_of(held)  # a union asks no element for its hash


def _same(held: Any, content: Any) -> bool:
    """Whether a container holds the very same objects, in the same order."""
    now = _content(held)
    if len(now) != len(content):
        return False
    if isinstance(now, dict):
        pairs = zip(now.items(), content.items(), strict=True)
        return all(a is b and key is other for (key, a), (other, b) in pairs)
    return now == content if isinstance(now, set) else all(a is b for a, b in zip(now, content, strict=True))


def _restore(held: Any, content: Any, only_tensors: bool) -> bool:
    """Puts back what was in a container. Returns whether it has done anything."""
    now = _content(held)
    if isinstance(held, dict):
        plain = dict_class(held)
        new = [key for key, value in now.items() if content.get(key, now) is not value]
        wrong = [key for key in new if not only_tensors or holds_tensor(now[key])]
        for key in wrong:
            if key in content:
                plain.__setitem__(held, key, content[key])
            else:
                take_key(held, key)
        if not only_tensors and any(a is not b for a, b in zip_longest(items_of(held), content)):
            for key, value in content.items():  # which are gone, or in another order; never all at once
                take_key(held, key)
                plain.__setitem__(held, key, value)
        return bool(wrong) or not only_tensors
    if only_tensors:
        known = set(map(id, content))
        wrong = [value for value in now if id(value) not in known and holds_tensor(value)]
        for value in wrong:
            take_value(held, value)
        return bool(wrong)
    if isinstance(held, list):
        list.__setitem__(held, slice(None), content)
    elif isinstance(held, set):
        set.clear(held)
        set.update(held, content)
    else:
        deque.clear(held)
        deque.extend(held, content)
    return True


def take_key(held: dict[Any, Any], key: Any) -> None:
    """Takes an item out of a dict, past what its class does when that happens."""
    with suppress(KeyError):  # another thread has removed it
        dict_class(held).__delitem__(held, key)


def take_value(held: Any, value: Any) -> None:
    """Takes an object out of a list, deque or set; equality says nothing of tensors."""
    if isinstance(held, set):
        set.discard(held, value)
        return
    place = next((place for place, other in enumerate(_content(held)) if other is value), None)
    if place is not None:
        del held[place]
