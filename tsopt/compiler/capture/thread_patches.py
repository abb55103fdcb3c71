"""Limits the functions that tracers patch globally to the thread that traces.

torch.fx, and torch.export through it, patch the call and the attribute lookup of every nn.Module while they trace;
torch.export also patches `max`, `min` and `math.pow`, and sets flags that models check.
"""

from __future__ import annotations

import builtins
import functools
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.export import _trace
from torch.fx import _symbolic_trace

from tsopt.compiler import forks
from tsopt.compiler.turns import Turn

TRACING = Turn()  # two tracers at once would see, and put back, each other's functions
FUNCTIONS = ((builtins, "max"), (builtins, "min"), (math, "pow"))
FLAGS = ("_is_compiling_flag", "_is_exporting_flag")
FX_FLAG = "_is_fx_tracing_flag"
PLACES: tuple[tuple[Any, str], ...] = (  # where tracers, and this module, put something else
    *((nn.Module, name) for name in ("__call__", "__getattr__")),
    *FUNCTIONS,
    *((torch.compiler, name) for name in FLAGS),
    (_symbolic_trace, FX_FLAG),
    (_symbolic_trace._Patcher, "patch_method"),
    *((_trace, name) for name in ("_override_builtin_ops", "_compiling_state_context")),
)
# Of each block that traces, the number of its thread, and what was there before.
_PATCHED: list[tuple[int, list[tuple[Any, str, Any]]]] = []


@contextmanager
def apart(on_call: Callable[[nn.Module], None] | None = None) -> Iterator[None]:
    """Runs a block that traces; other threads call what they would call without it. One thread traces at a time.

    Args:
        on_call: called with each module that is called during tracing.
    """
    tell = on_call or (lambda module: None)
    patch_method = _symbolic_trace._Patcher.patch_method

    def patch_here(self: Any, cls: type, name: str, new: Callable[..., Any], deduplicate: bool = True) -> None:
        old, traced = getattr(cls, name), new
        if (cls, name) == (nn.Module, "__call__"):

            @functools.wraps(new)
            def traced(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                tell(module)
                return new(module, *args, **kwargs)

        if hasattr(_symbolic_trace, FX_FLAG):  # from torch 2.14 on, each thread has its own
            setattr(_symbolic_trace, FX_FLAG, _Here(getattr(_symbolic_trace, FX_FLAG), False))
        patch_method(self, cls, name, _only_here(traced, old), deduplicate)

    with TRACING.taken(waits=True), _noted(), ExitStack() as stack:
        stack.enter_context(patch.object(_symbolic_trace._Patcher, "patch_method", patch_here))
        for name, here in (("_override_builtin_ops", _functions), ("_compiling_state_context", _flags)):
            if hasattr(_trace, name):
                stack.enter_context(patch.object(_trace, name, functools.partial(here, getattr(_trace, name))))
        yield


@contextmanager
def _noted() -> Iterator[None]:
    """Notes what tracers put something in place of, for a fork meanwhile."""
    places = [place for place in PLACES if hasattr(*place)]
    _PATCHED.append((threading.get_ident(), [(owner, name, getattr(owner, name)) for owner, name in places]))
    try:
        yield
    finally:
        _PATCHED.pop()


@forks.in_child
def _put_back() -> None:
    """Another thread has traced, and is not there any more."""
    if _PATCHED and _PATCHED[0][0] != threading.get_ident():
        for owner, name, value in _PATCHED[0][1]:
            setattr(owner, name, value)
        _PATCHED.clear()


@contextmanager
def _functions(override: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    before = [getattr(owner, name) for owner, name in FUNCTIONS]
    with override():
        for (owner, name), old in zip(FUNCTIONS, before, strict=True):
            setattr(owner, name, _only_here(getattr(owner, name), old))
        yield


@contextmanager
def _flags(raised: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    before = [getattr(torch.compiler, name) for name in FLAGS]
    with raised():
        for name, old in zip(FLAGS, before, strict=True):
            setattr(torch.compiler, name, _Here(True, old))
        yield


def _only_here(here: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `here` for this thread, and `elsewhere` for the others."""
    owner = threading.get_ident()

    @functools.wraps(here)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (here if threading.get_ident() == owner else elsewhere)(*args, **kwargs)

    return chosen


class _Here:
    """A flag with one value for this thread, and another for the others."""

    def __init__(self, here: object, elsewhere: object) -> None:
        self.here, self.elsewhere, self.owner = bool(here), bool(elsewhere), threading.get_ident()

    def __bool__(self) -> bool:
        return self.here if threading.get_ident() == self.owner else self.elsewhere

    # What libraries do with a flag other than testing it: transformers combines several with `|=`.
    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))
