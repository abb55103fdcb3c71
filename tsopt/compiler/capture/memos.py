"""Removes tensors without values from caches of the user's code: `functools.lru_cache`, containers, objects, classes.

A model that caches a table of positions for each size would otherwise go on with a tensor of the tracer.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tsopt.compiler.calls.snapshot import attributes_of, items_of
from tsopt.compiler.contents import is_library, take_key, take_value

MOST = 64  # tensors that are looked for: each search goes through all objects of the process
HOLDERS = (functools._lru_cache_wrapper, dict, list, set, deque)  # what can have got a tensor since it was frozen
LEAVES = (str, bytes, int, float, bool, type(None))


def forget(mode: weakref.ref[FakeTensorMode]) -> bool:
    """Removes the tensors of a mode that is no longer in use from the caches that hold them.

    Returns:
        Whether there were any.
    """
    for generation in (0, 1, 2):  # tracers leave cycles, most of them young: the whole heap is seldom looked through
        if mode() is None:
            return False
        gc.collect(generation)
    alive = mode()
    if alive is None:
        return False
    left = [
        item
        for item in gc.get_objects()
        if issubclass(type(item), FakeTensor) and getattr(item, "fake_mode", None) is alive
    ][:MOST]
    if not left:
        return False
    frozen = _frozen_containers()
    found = False
    todo: list[Any] = list(left)
    seen = {id(left), id(todo), *map(id, left)}
    while todo:
        wave, todo = todo, []
        seen |= {id(wave), id(todo)}
        for item, holder in _held_by(wave, frozen):
            kind = type(holder)
            if issubclass(kind, functools._lru_cache_wrapper):
                holder.cache_clear()
                found = True
            elif issubclass(kind, dict):
                found |= _taken_from_dict(holder, item)
            elif issubclass(kind, (set, deque)):
                take_value(holder, item)
                found = True
            elif kind in (tuple, list) and id(holder) not in seen:
                seen.add(id(holder))
                if kind is tuple or all(map(_is_left, holder)):
                    todo.append(holder)
                else:  # somebody collects in it what is not a tracer's
                    holder[:] = [value for value in holder if not _is_left(value)]
                    found = True
            elif not issubclass(kind, (tuple, list)) and not is_library(kind.__module__):
                found |= _taken_from_object(holder, item)
    return found


def _taken_from_dict(held: dict[Any, Any], item: Any) -> bool:
    keys = [key for key, value in items_of(held).items() if value is item]
    cls = _class_with(held) if keys else None
    for key in keys:
        if cls is None:
            take_key(held, key)
        else:  # Python would go on reading from a cache what only its dict has lost
            with suppress(AttributeError):  # another thread has removed it
                type.__delattr__(cls, key)
    return bool(keys)


def _taken_from_object(holder: Any, item: Any) -> bool:
    """From its slots, or its attributes: as long as nobody asks for its dict, Python keeps them without one."""
    names = [name for name, value in attributes_of(holder).items() if value is item]
    for name in names:
        with suppress(AttributeError):  # another thread has removed it
            object.__delattr__(holder, name)
    return bool(names)


def _class_with(namespace: dict[Any, Any]) -> type | None:
    """The class whose attributes are in a dict; None for any other dict."""
    todo, seen = [object], set[int]()
    while todo and "__module__" in namespace:
        cls = todo.pop()
        if any(held is namespace for held in gc.get_referents(vars(cls))):
            return cls
        new = [other for other in type.__subclasses__(cls) if id(other) not in seen]
        todo += new
        seen.update(map(id, new))
    return None


def _is_left(value: Any) -> bool:
    """Whether it is a tensor of a tracer, or a tuple of such."""
    return issubclass(type(value), FakeTensor) or (type(value) is tuple and any(map(_is_left, value)))


def _held_by(wave: list[Any], frozen: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs of an item and what refers to it."""
    by_id = {id(item): item for item in wave}
    pairs = [(item, holder) for item in wave for holder in gc.get_referrers(item) if holder is not by_id]
    for holder in frozen:
        pairs += [(by_id[id(item)], holder) for item in gc.get_referents(holder) if id(item) in by_id]
    return pairs


def _frozen_containers() -> list[Any]:
    """Containers that `gc.freeze()` has hidden from `gc.get_referrers`, as servers that fork call it.

    They cannot be listed, but everything that a module of Python leads to can be walked.
    """
    if not gc.get_freeze_count():
        return []
    known = {id(item) for item in gc.get_objects()}
    seen = {id(module) for module in sys.modules.values()}
    todo: list[Any] = list(sys.modules.values())
    found: list[Any] = []
    while todo:
        item = todo.pop()
        if isinstance(item, HOLDERS) and id(item) not in known:
            found.append(item)
        for other in gc.get_referents(item):
            if id(other) not in seen and not isinstance(other, LEAVES):
                seen.add(id(other))
                todo.append(other)
    return found
