"""Removes tensors without values from caches of the user's code (`functools.lru_cache`, dicts).

A model that caches a table of positions for each size would otherwise go on with a tensor of the tracer.
"""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

MOST = 64  # tensors that are looked for: each search goes through all objects of the process


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
        item for item in gc.get_objects() if type(item) is FakeTensor and getattr(item, "fake_mode", None) is alive
    ][:MOST]
    found = False
    todo: list[Any] = list(left)
    seen = {id(left), id(todo), *map(id, left)}
    while todo:
        item = todo.pop()
        for holder in gc.get_referrers(item):
            if isinstance(holder, functools._lru_cache_wrapper):
                holder.cache_clear()
                found = True
            elif type(holder) is dict:
                for key in [key for key, value in holder.items() if value is item]:
                    del holder[key]
                    found = True
            elif type(holder) in (tuple, list) and id(holder) not in seen:
                seen.add(id(holder))
                todo.append(holder)
    return found
