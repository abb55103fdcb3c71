"""Infers the type of a call's result by running the op on fake tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program, Type, type_of, type_of_value

_DERIVED: WeakKeyDictionary[FakeTensorMode, dict[object, Type]] = WeakKeyDictionary()
# Layers whose kernels on a GPU look for weights that lie side by side in memory, which fakes do not have.
_RECURRENT = frozenset(op.input for op in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu))


class _Refusals(logging.Filter):
    """Drops what torch logs of calls that it refuses, in threads that report these themselves.

    It stays on the logger. Whether a logger is disabled belongs to the process: threads that changed it and put it back
    could leave it changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.here, "depth", 0)


_REFUSALS = _Refusals()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_REFUSALS)


def infer(program: Program, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The fake value of a call on nodes of the program.

    Raises:
        Exception: whatever the op raises for arguments that do not fit.
    """
    values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
    with fakes(program.fake_mode):
        return fake_call(target, *values)


def infer_on(program: Program, node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """The fake value of a node's call where its arguments have these values, not those that are recorded.

    Raises:
        Exception: whatever the op raises for arguments that do not fit.
    """
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), value_of)
    with fakes(program.fake_mode):
        return fake_call(node.target, args, kwargs)


def fake_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call on fake tensors, inside of `fakes`."""
    device = next((t.device for t in ops.tensors_of(args) if t.device.type != "cpu"), None)
    if device is None or target not in _RECURRENT:
        return target(*args, **kwargs)
    on_cpu = tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="cpu"), (args, kwargs))
    found = target(*on_cpu[0], **on_cpu[1])
    return tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=device), found)


@contextmanager
def fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Calls on fake tensors. What an op refuses is raised and not logged: the caller reports it."""
    here = _REFUSALS.here
    here.depth = getattr(here, "depth", 0) + 1
    try:
        with torch.no_grad(), mode:
            yield
    finally:
        here.depth -= 1


def infer_type(program: Program, node: fx.Node) -> Type:
    """The type that a call has by its target and the types of its arguments, whatever is recorded for it.

    Worked out once for the same target and arguments: to call the op on fake tensors costs far more than to ask again.

    Raises:
        Exception: whatever the op raises for arguments that do not fit.
    """
    known = _DERIVED.setdefault(program.fake_mode, {})
    key = (node.target, _key(node.args), _key(tuple(node.kwargs.items())))
    if key not in known:
        known[key] = type_of_value(infer(program, node.target, node.args, dict(node.kwargs)))
    return known[key]


def _key(value: object) -> object:
    """What the type of a result can depend on."""
    if isinstance(value, fx.Node):
        # Besides the type: where views begin (`view_as_complex`) and what is behind them (`as_strided`).
        memory = [(t.storage_offset(), t.untyped_storage().nbytes()) for t in ops.tensors_of(value.meta.get("val"))]
        return (_hashable(type_of(value)), *map(_hashable, memory))
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    return type(value), _hashable(value)


def _hashable(value: object) -> object:
    """A value, or its text: symbolic numbers say that they can be hashed, and cannot."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def infer_weight(program: Program, tensor: torch.Tensor) -> Any:
    """The fake value of a weight."""
    return program.fake_mode.from_tensor(tensor, static_shapes=True)
