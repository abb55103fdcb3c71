"""The ops of TorchScript that are Python's own: containers, numbers and flags, by their names there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch


def _set_item(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _append(container: list[Any], value: Any) -> list[Any]:
    container.append(value)
    return container


def _extend(container: list[Any], values: Iterable[Any]) -> None:
    container.extend(values)


def _sort(container: list[Any], reverse: bool = False) -> None:
    container.sort(reverse=reverse)


def _pop_item(container: dict[Any, Any]) -> tuple[Any, Any]:
    key = next(iter(container))  # TorchScript takes the first one, Python the last
    return key, container.pop(key)


def _slice(value: Any, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return value[slice(start, end, step)]


# TorchScript has dtypes as numbers, in the order of c10::ScalarType.
_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {number: getattr(torch, name) for number, name in enumerate(_NAMES)} | {11: torch.bool, 15: torch.bfloat16}

# Containers are Python's own, so that what is appended to one stays there; numbers and flags too.
PYTHON: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "_set_item": _set_item,
    "append": _append,
    "extend": _extend,
    "insert": lambda container, place, value: container.insert(place, value),
    "pop": lambda container, *place: container.pop(*place),
    "remove": lambda container, value: container.remove(value),
    "sort": _sort,
    "add_": operator.iadd,
    "mul_": operator.imul,
    "Delete": operator.delitem,
    "update": lambda container, other: container.update(other),
    "setdefault": lambda container, key, value: container.setdefault(key, value),
    "popitem": _pop_item,
    "reverse": lambda container: container.reverse(),
    "clear": lambda container: container.clear(),
    "copy": lambda container: container.copy(),
    "list": list,
    "keys": lambda container: list(container.keys()),
    "values": lambda container: list(container.values()),
    "items": lambda container: list(container.items()),
    "get": lambda container, *rest: container.get(*rest),
    "__contains__": lambda container, value: value in container,
    "len": len,
    "slice": _slice,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    "__not__": operator.not_,
    "__range_length": lambda start, end, step: len(range(start, end, step)),
    "__derive_index": lambda index, start, step: start + index * step,
    "format": lambda text, *values: text.format(*values),
    "warn": lambda *_: None,
    "dim": lambda value: value.dim(),
    "size": lambda value, *dim: list(value.shape) if not dim else value.shape[dim[0]],
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floordiv": operator.floordiv,
    "remainder": operator.mod,
    "neg": operator.neg,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "floor": lambda value: int(value // 1),
    "ceil": lambda value: -int(-value // 1),
    "Int": int,
    "Float": float,
    "Bool": bool,
    "tensor": lambda data, dtype=None, device=None, requires_grad=False: torch.tensor(
        data, dtype=None if dtype is None else _DTYPES[dtype], device=device
    ),
}
# Those that are ops of tensors as well, and then called as such.
TENSOR_TOO = frozenset(PYTHON) - {"__is__", "__isnot__", "append", "_set_item", "extend", "insert", "size", "dim"}
TENSOR_TOO -= {"Delete", "update", "setdefault", "popitem"}
TENSOR_TOO -= {"pop", "list", "__contains__", "len", "format", "warn", "values", "items", "keys", "get", "copy"}
# The same of flags and numbers that are tensors, because values decide about them.
DECIDED: dict[str, Callable[..., Any]] = {
    **{name: PYTHON[name] for name in ("mul", "floordiv", "remainder", "neg", "eq", "ne", "lt", "le", "gt", "ge")},
    "add": lambda a, b, alpha=1: a + (b if alpha == 1 else b * alpha),
    "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else b * alpha),
    "__not__": torch.logical_not,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
}
SCALARS = frozenset({"int", "bool", "number", "Scalar"})
