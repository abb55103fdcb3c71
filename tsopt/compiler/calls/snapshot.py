"""The contents of objects that are passed through uncopied: found at any depth, printed, compared, restored.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import io
from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any


class Wrapper:
    """What is callable because of what it wraps: an argument like a function, not an object with data."""


class Behind:
    """What is behind a hybrid of a `model`: no part of any model, although a hybrid in it leads there."""

    model: Any


SCALARS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, Wrapper)
FIXED = (*SCALARS, *FUNCTIONS, Behind, type, ModuleType, Enum, PurePath, range, slice)
PLAIN_TENSORS = ("Tensor", "Parameter", "Buffer")
SYMBOLIC = ("SymInt", "SymFloat", "SymBool")
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python's, or one of C that has been made at run time
LAID_OUT = (object, dict, OrderedDict, SimpleNamespace)  # classes of C whose instances are their items and attributes
ORDERED, UNORDERED = (list, deque, bytearray), (set,)


def is_leaf(value: object) -> bool:
    """Whether it is a tensor or an array: whatever speaks DLPack. The class says so: instances may answer anything."""
    cls = type(value)
    return hasattr(cls, "__dlpack__") or cls.__module__ == "torch.fx.proxy"  # what torch.fx passes instead of tensors


def is_symbolic(value: object) -> bool:
    """Whether it is a number that torch computes from sizes while it traces."""
    return type(value).__name__ in SYMBOLIC


def attributes_of(item: Any) -> dict[str, Any]:
    """What is set on an object itself, by name: past properties and whatever its class does, with slots."""
    return in_slots(item) | dict(item.__dict__ if has_dict(item) else {})


def in_slots(item: Any) -> dict[str, Any]:
    """What is set on an object in places that `__slots__` of its class have laid out, by name."""
    slots = {}
    for name in _slots_of(item):
        with contextlib.suppress(AttributeError):  # not set
            slots[name] = object.__getattribute__(item, name)
    return slots


def has_dict(item: Any) -> bool:
    """Whether an object has a `__dict__`, without calling `__getattr__` of its class."""
    return type(item).__dictoffset__ != 0


def _slots_of(item: Any) -> list[str]:
    return slot_names(type(item))


def slot_names(cls: Any) -> list[str]:
    """The names that `__slots__` of a class and of its bases have laid out."""
    return _slots(cls)


def has_only_dict(cls: Any) -> bool:
    """Whether all attributes of the objects of a class are in their `__dict__`."""
    return cls.__dictoffset__ != 0 and not _slots(cls)


@lru_cache(maxsize=1024)
def is_python(cls: type) -> bool:
    """Whether an instance is its attributes, and its items if it is a dict: nothing else that C has laid out."""
    own = [base for base in cls.__mro__ if base not in LAID_OUT]
    slots = sum(len(vars(base).get("__slots__", ())) for base in own)
    room = max(base.__basicsize__ for base in cls.__mro__ if base in LAID_OUT)
    return all(base.__flags__ & HEAP_TYPE for base in own) and cls.__basicsize__ <= room + 8 * (slots + 2)


@lru_cache(maxsize=1024)
def _slots(cls: type) -> list[str]:
    members = ((name, member) for base in cls.__mro__ for name, member in vars(base).items())
    return [name for name, member in members if isinstance(member, MemberDescriptorType) and not name.startswith("__")]


def set_attribute(item: Any, name: str, value: Any) -> None:
    """Past properties and whatever its class does when an attribute is set."""
    if has_dict(item) and not isinstance(getattr(type(item), name, None), MemberDescriptorType):
        item.__dict__[name] = value
    else:
        object.__setattr__(item, name, value)


def _elements(item: Any) -> list[Any] | dict[Any, Any] | None:
    if isinstance(item, dict):
        return items_of(item)
    return elements_of(item) if isinstance(item, (*ORDERED, *UNORDERED)) else None


def _parts(item: Any) -> list[Any]:
    elements = _elements(item)
    found = elements_of(item) if isinstance(item, (tuple, frozenset)) else []
    found += elements.values() if isinstance(elements, dict) else elements or []
    return [*found, *attributes_of(item).values()]


def holders(*roots: Any) -> Iterator[Any]:
    """Everything below and among these that can change: containers, and objects with attributes; each once."""
    todo, seen = list(roots)[::-1], {}
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, FIXED) or is_leaf(item) or is_symbolic(item):
            continue
        seen[id(item)] = item  # held on to: what is gone could have its id taken
        if isinstance(item, (dict, *ORDERED, *UNORDERED)) or has_dict(item) or _slots_of(item):
            yield item
        todo += _parts(item)[::-1]


def without_hybrid(function: FunctionType) -> FunctionType:
    """The function that a hybrid is of; any other is itself."""
    behind = function.__dict__.get("_tsopt_compiled")  # which `functools.wraps` copies to what is around a hybrid
    is_hybrid = isinstance(behind, Behind) and function.__dict__.get("__wrapped__") is behind.model
    return function.__dict__["__wrapped__"] if is_hybrid else function


def held_by(model: Any) -> set[int]:
    """The ids of what a model holds: below a module's attributes, or around a function."""
    roots, todo, seen = [], [model], set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, MethodType):
            todo += [item.__self__, item.__func__]
        elif isinstance(item, partial):
            todo += [item.func, item.args, item.keywords]
        elif isinstance(item, FunctionType):
            todo += [*_around(item), *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        else:
            roots.append(item)
    return set(map(id, holders(*roots)))


def _around(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that has no value yet
            yield cell.cell_contents


def told(item: Any) -> str:
    """All that an object holds, in a line that changes when it does."""
    found = list(holders(item))
    places = {id(holder): number for number, holder in enumerate(found)}

    def said(part: Any) -> str:
        if id(part) in places:
            return f"#{places[id(part)]}"
        if isinstance(part, SCALARS):
            return repr(part)
        if isinstance(part, (tuple, frozenset)):
            return f"({', '.join(map(said, elements_of(part)))})"
        return f"{type(part).__name__} {id(part):x}{_memory(part) if is_leaf(part) else ''}"

    def line(holder: Any) -> str:
        elements = _elements(holder) or []
        pairs = list(elements.items()) if isinstance(elements, dict) else list(enumerate(elements))
        texts = [f"{said(key)}: {said(part)}" for key, part in (*pairs, *attributes_of(holder).items())]
        return f"{type(holder).__name__}({', '.join(sorted(texts) if isinstance(holder, set) else texts)})"

    return "; ".join(map(line, found))


def _memory(leaf: Any) -> str:
    """Where a tensor lies, which `.data =` changes, and how often it was written; nothing of what has neither."""
    found = ""
    if type(leaf).__name__ in PLAIN_TENSORS:  # those of a tracer complain when they are asked
        with contextlib.suppress(RuntimeError, AttributeError):
            found += f" at {leaf.data_ptr():x}"
    with contextlib.suppress(RuntimeError, AttributeError):  # a tensor of inference mode, an array
        found += f" {leaf._version}"
    return found


def is_iterator(value: object) -> bool:
    return hasattr(type(value), "__next__")


def iterator_in(*roots: Any) -> Any:
    """An iterator among these, or in their containers and attributes; None if there is none.

    Reading an iterator exhausts it, so a call that has one cannot be repeated for comparison. A file is one only where
    it is given itself, not where some object logs to it.
    """
    todo, seen = [(root, True) for root in roots[::-1]], {}
    while todo:
        item, is_given = todo.pop()
        if id(item) in seen or isinstance(item, FIXED) or is_leaf(item) or is_symbolic(item):
            continue
        if is_iterator(item) and (is_given or not isinstance(item, io.IOBase)):
            return item
        seen[id(item)] = item
        is_given = is_given and isinstance(item, (tuple, frozenset, dict, *ORDERED, *UNORDERED))
        todo += [(part, is_given) for part in _parts(item)[::-1]]
    return None


class Snapshot:
    """What an object holds now, however deep, to be compared and put back."""

    def __init__(self, item: Any) -> None:
        self._shallow = [(holder, _elements(holder), attributes_of(holder)) for holder in holders(item)]

    def __bool__(self) -> bool:
        return bool(self._shallow)

    def changed(self) -> bool:
        return not all(
            _alike(_elements(holder), elements) and _alike(attributes_of(holder), attributes)
            for holder, elements, attributes in self._shallow
        )

    def restore(self) -> None:
        for holder, elements, attributes in self._shallow:
            if not _alike(_elements(holder), elements):
                _refill(holder, elements)
            for name in attributes_of(holder).keys() - attributes.keys():
                object.__delattr__(holder, name)
            for name, value in attributes.items():
                set_attribute(holder, name, value)


def _alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, dict):
        return list(mine) == list(other) and all(map(same, mine.values(), other.values()))
    return mine is other or (len(mine) == len(other) and all(map(same, mine, other)))


def _refill(holder: Any, elements: Any) -> None:
    if isinstance(holder, dict):
        refill_items(holder, elements)
        return
    kind = builtin_class(holder)
    kind.clear(holder)
    (kind.update if kind is set else kind.extend)(holder, elements)


def dict_class(item: dict[Any, Any]) -> Any:
    """The class whose methods read and write a dict past those of its own class.

    An OrderedDict keeps its order beside its items: the methods of dict would leave the two in disagreement.
    """
    return OrderedDict if isinstance(item, OrderedDict) else dict


def items_of(item: dict[Any, Any]) -> dict[Any, Any]:
    """What a dict holds, in its order, past whatever its class does when it is read."""
    if not issubclass(type(item), dict):  # a proxy
        return dict(item.items())
    return dict(OrderedDict.items(item)) if isinstance(item, OrderedDict) else dict.copy(item)


def elements_of(item: Any) -> list[Any]:
    """What a tuple, list, set, frozenset, deque or bytearray holds, past whatever its class does when it is read."""
    kind = builtin_class(item)
    return list(item if kind is None else kind.__iter__(item))


def builtin_class(item: Any) -> Any:
    """The builtin class of a container; None if it only says that it is one, as a proxy does."""
    return next((kind for kind in (tuple, frozenset, *ORDERED, *UNORDERED) if issubclass(type(item), kind)), None)


def refill_items(target: dict[Any, Any], items: dict[Any, Any]) -> None:
    """Makes a dict hold these, past whatever its class does when they are set."""
    plain = dict_class(target)
    plain.clear(target)
    for key, value in items.items():
        plain.__setitem__(target, key, value)


def same(part: Any, other: Any) -> bool:
    """Whether a part is the one that was there: itself, or the same plain value."""
    if part is other:
        return True
    return isinstance(part, SCALARS) and type(part) is type(other) and bool(part == other)
