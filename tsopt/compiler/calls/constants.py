"""Constants of a call: whether a compiled program, which has them baked in, computes the same with others.

It does where they are one object that holds what it held, or one plain value: 1, 1.0 and True are not. Does not import
torch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from tsopt.compiler.calls.snapshot import (
    CONTAINERS,
    HEAP_TYPE,
    SCALARS,
    attributes_of,
    content_of,
    elements_of,
    has_dict,
    holders,
    is_leaf,
    is_library,
    is_symbolic,
    items_of,
    slot_names,
)

ATOMS = frozenset(SCALARS)
EQUAL = frozenset({int, str, bytes, bool})  # of these very types, what is equal is the same
ONLY_ITSELF = (type, FunctionType, ModuleType, Enum)
WRITTEN = (PurePath, range)  # they are what they are written as
CLOSED = (*WRITTEN, BuiltinFunctionType, Enum)  # they hold nothing
CODE = (type, FunctionType, MethodType, ModuleType)  # it computes with what is around it
MADE = frozenset({"_abc_impl", "_fields", "_field_defaults"})  # what Python adds to classes
FOLLOWED = 64  # of these, in one constant; what lies deeper is for audits
Pairs = list[tuple[Any, Any]]


def same(value: Any, other: Any) -> bool:
    """Whether two constants are one, apart from what they hold."""
    if value is other:
        return True
    if isinstance(value, ONLY_ITSELF) or can_change(value) or can_change(other):
        return False
    return equal(value, other)


def equal(value: Any, other: Any) -> bool:
    """Whether two values are written alike in each of their parts: -0.0 is not 0.0, and NaN is NaN."""
    if value is other:
        return True
    if type(value) is not type(other) or is_leaf(value):
        return False
    if type(value) in EQUAL:
        return bool(value == other)
    if isinstance(value, tuple):
        return all_equal(elements_of(value), elements_of(other))
    if isinstance(value, slice):
        return all_equal(_ends(value), _ends(other))
    if isinstance(value, MethodType):
        return value.__self__ is other.__self__ and value.__func__ is other.__func__
    if isinstance(value, frozenset):
        return {(type(part), repr(part)) for part in value} == {(type(part), repr(part)) for part in other}
    return repr(value) == repr(other) and bool(value == other or value != value)


def all_equal(values: Any, others: Any) -> bool:
    """Whether values are equal one by one."""
    return len(values) == len(others) and all(map(equal, values, others))


def can_change(value: Any) -> bool:
    """Whether a constant is an object that may hold something else in the next call."""
    kind = type(value)
    if kind in ATOMS or kind.__module__ == "torch" or isinstance(value, Enum):
        return False
    if isinstance(value, SCALARS):
        return bool(attributes_of(value))
    return next(holders(value), None) is not None


def told(value: Any) -> Told | None:
    """What a constant holds now; None for one that holds nothing."""
    kind = type(value)
    if kind in ATOMS or kind.__module__ == "torch" or isinstance(value, CLOSED):
        return None
    return Told(value)


class Told:
    """All that a value holds now, and what its functions and classes read; equal to another while both hold the same.

    NOTE: the parts are referred to weakly. Addresses are used again: what is gone must not be taken for what has its
    address now; nor should old tensors be kept alive.
    """

    __slots__ = ("_parts", "_text")

    def __init__(self, value: Any) -> None:
        self._parts: list[Callable[[], Any]] = []
        found = list(_followed(value))
        places = {id(item): number for number, (item, _) in enumerate(found)}
        self._text = "; ".join(self._line(item, pairs, places) for item, pairs in found)

    def __str__(self) -> str:
        return self._text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Told) or self._text != other._text or len(self._parts) != len(other._parts):
            return False
        found = ((mine(), theirs()) for mine, theirs in zip(self._parts, other._parts, strict=True))
        return all(mine is theirs and mine is not None for mine, theirs in found)

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> Any:
        """In another process, nothing is there that it refers to."""
        return _elsewhere, (self._text, len(self._parts))

    def _line(self, item: Any, pairs: Pairs, places: dict[int, int]) -> str:
        if isinstance(item, (type, ModuleType)):
            self._refer(item)
        texts = [f"{self._said(key, places)}: {self._said(part, places)}" for key, part in pairs]
        return f"{type(item).__name__}({', '.join(sorted(texts) if isinstance(item, set) else texts)})"

    def _said(self, part: Any, places: dict[int, int]) -> str:
        if id(part) in places:
            return f"#{places[id(part)]}"
        if type(part) in ATOMS:
            return repr(part)
        if isinstance(part, (tuple, frozenset)):
            return f"{type(part).__name__} ({', '.join(self._said(inner, places) for inner in elements_of(part))})"
        if isinstance(part, WRITTEN) or (isinstance(part, SCALARS) and not isinstance(part, Enum)):
            return f"{type(part).__name__} {part!r}"
        self._refer(part)
        return f"{type(part).__name__}{self._memory(part) if is_leaf(part) else ''}"

    def _memory(self, leaf: Any) -> str:
        """What differs once a tensor or an array has been written to, or has other memory."""
        if hasattr(leaf, "tobytes"):  # nothing counts the writes to an array
            return f" {leaf.dtype} {leaf.shape} {hash(leaf.tobytes()):x}"
        if not hasattr(type(leaf), "untyped_storage"):
            return ""
        version = 0 if leaf.is_inference() else leaf._version
        try:
            self._refer(leaf.untyped_storage())
            place = f"{leaf.storage_offset()} {leaf.stride()}"
        except (NotImplementedError, RuntimeError, ValueError):  # it has none: a sparse tensor, one of torch.func
            place = ""
        return f" {version} {leaf.dtype} {leaf.shape} {place}"

    def _refer(self, part: Any) -> None:
        try:
            self._parts.append(weakref.ref(part))
        except TypeError:  # its class supports none
            self._parts.append(lambda: part)


def _elsewhere(text: str, count: int) -> Told:
    made = Told(None)
    made._text, made._parts = text, [lambda: None] * count
    return made


def _followed(root: Any) -> Iterator[tuple[Any, Pairs]]:
    """What can change below and among a value, and code: each once, with what it holds by key and by name."""
    todo, left = [root], FOLLOWED
    seen: dict[int, Any] = {}  # held on to: what is gone could have its id taken
    while todo:
        item = todo.pop()
        if id(item) in seen or type(item) in ATOMS or is_leaf(item) or is_symbolic(item):
            continue
        seen[id(item)] = item
        if isinstance(item, CODE):
            pairs = _around(item) if left else []
            left -= bool(pairs)
        else:
            pairs = _held_by(item)
        if pairs or _is_open(item):
            yield item, pairs
            todo.append(type(item))
        elif isinstance(item, (tuple, frozenset)):
            todo += elements_of(item)[::-1]
        todo += [part for pair in pairs for part in pair][::-1]


def _is_open(item: Any) -> bool:
    """Whether it holds nothing, but can."""
    if isinstance(item, (*CLOSED, *SCALARS, *CODE, tuple, frozenset)):
        return False
    return isinstance(item, CONTAINERS) or has_dict(item) or bool(slot_names(type(item)))


def _held_by(item: Any) -> Pairs:
    if isinstance(item, CLOSED):
        return []
    pairs: Pairs = list(attributes_of(item).items())
    if isinstance(item, dict):
        pairs = [*items_of(item).items(), *pairs]
    elif isinstance(item, CONTAINERS) or (isinstance(item, (tuple, frozenset)) and pairs):
        pairs = [*enumerate(elements_of(item)), *pairs]
    elif isinstance(item, SCALARS):
        pairs = [("value", repr(item)), *pairs] if pairs else []
    elif isinstance(item, slice):
        pairs += zip(("start", "stop", "step"), _ends(item), strict=True)
    elif isinstance(item, partial):
        pairs += [("func", item.func), ("args", item.args), ("keywords", item.keywords)]
    return pairs


def _ends(value: slice) -> tuple[Any, Any, Any]:
    return value.start, value.stop, value.step


def _around(item: Any) -> Pairs:
    """What code computes with beside its arguments; nothing of a library's."""
    if isinstance(item, MethodType):
        return [("self", item.__self__), ("function", item.__func__)]
    if is_library(item.__name__ if isinstance(item, ModuleType) else item.__module__):
        return []
    if isinstance(item, type):
        return list(values_of(item).items())
    if isinstance(item, ModuleType):
        return [(name, value) for name, value in vars(item).items() if name[:2] != "__" and not _is_code(value)]
    closure = zip(item.__code__.co_freevars, map(content_of, item.__closure__ or ()), strict=True)
    own = [("code", item.__code__), ("defaults", item.__defaults__), ("keywords", item.__kwdefaults__)]
    return [*own, *closure, *_globals_of(item)]


def _globals_of(function: FunctionType) -> Pairs:
    """The globals that a function names, and of modules and objects among them the attributes that it names."""
    names, pairs = set(_names_in(function.__code__)), Pairs()
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if type(value) in ATOMS or is_leaf(value) or isinstance(value, (*CONTAINERS, tuple, type, FunctionType)):
            pairs.append((name, value))
        elif not isinstance(value, ModuleType) or not is_library(value.__name__):
            held = attributes_of(value)
            pairs += [(f"{name}.{inner}", held[inner]) for inner in sorted(names & held.keys())]
    return pairs


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def values_of(cls: type) -> dict[str, Any]:
    """What a class of the user's has that its objects share, methods and the like apart."""
    if not cls.__flags__ & HEAP_TYPE:
        return {}
    own = [base for base in cls.__mro__[::-1] if base.__flags__ & HEAP_TYPE and not is_library(base.__module__)]
    return {
        name: value
        for base in own
        for name, value in list(vars(base).items())
        if not name.startswith("__") and name not in MADE and not hasattr(type(value), "__get__")
    }


def _is_code(value: Any) -> bool:
    return isinstance(value, (*CODE, BuiltinFunctionType))
