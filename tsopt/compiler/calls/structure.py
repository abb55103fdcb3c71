"""Flattens nested arguments and results into tensors, and back.

Owns the description of a nesting (`Structure`). Uses no pytree registry and does not import torch: a leaf is anything
that supports DLPack (torch tensors, numpy arrays).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import BuiltinFunctionType, SimpleNamespace
from typing import Any

from tsopt.compiler.calls.constants import Told, all_equal, same, told, values_of
from tsopt.compiler.calls.snapshot import (
    FIXED,
    attributes_of,
    elements_of,
    has_dict,
    is_leaf,
    is_python,
    is_symbolic,
    items_of,
    refill_items,
    set_attribute,
)
from tsopt.errors import BundleError, CaptureError

OF_TORCHSCRIPT = "torch._jit_internal"  # where it makes the class of a NamedTuple, in each call a new one


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """One node of a nesting.

    kind is `leaf` (a tensor, `index` into the flat list), `const` (a value kept as it was), `tuple`,
    `list`, `dict`, `namedtuple` or `object` (dataclasses, model outputs, caches: items of the mapping or the tuple,
    if it is one, then attributes). Two structures are equal when the same call would be made: constants
    count by type and value, and by what they, or the class of an object, hold: `contents`, None where that is unknown
    or nothing. A list, a dict or an object met twice is `shared` the second time, by the number of the first; one of
    the call itself is `given`, and `keys` are the path to it. An integer that goes along with a size of a tensor of
    the call is a `size`: `index` and `keys` are those of the tensor, `value` its axis and what is added.
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    index: int = -1
    value: Any = None
    contents: Told | None = None
    named: str = ""  # the class of an object, or one that is a constant, where a file names what cannot be had

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure) or not _same_form(self, other) or self.index != other.index:
            return False
        if self.children != other.children or not _same_class(self, other):
            return False
        if self.contents is not None and other.contents is not None and self.contents != other.contents:
            return False
        by_name = self.named or other.named or self.kind not in ("const", "size") or isinstance(self.value, type)
        return bool(by_name) or same(self.value, other.value)

    def __hash__(self) -> int:
        return hash((self.kind, self.keys, self.index, len(self.children)))

    def __str__(self) -> str:
        if self.kind in ("leaf", "shared", "given", "size"):
            return "*"
        if self.kind == "const":
            return repr(self.value) if not isinstance(self.value, type) else name_of(self.value)
        if self.kind in ("tuple", "list"):
            inner = ", ".join(str(child) for child in self.children)
            return f"({inner})" if self.kind == "tuple" else f"[{inner}]"
        inner = ", ".join(f"{key}: {child}" for key, child in zip(self.labels(), self.children, strict=True))
        name = "" if self.kind == "dict" or self.cls is None else self.cls.__name__
        name = name or self.named.rpartition(":")[2]
        return f"{name}{{{inner}}}"

    @property
    def leaf_count(self) -> int:
        return len({index for index, _ in self.paths()})

    def highest(self) -> int:
        """The highest index of a leaf; -1 where there is none."""
        if self.kind == "leaf":
            return self.index
        return max((child.highest() for child in self.children), default=-1)

    def paths(self, prefix: str = "") -> Iterator[tuple[int, str]]:
        """(index, readable path) of each leaf, in order; a shared leaf comes up more than once."""
        if self.kind == "leaf":
            yield self.index, prefix
        for key, child in zip(self.labels(), self.children, strict=True):
            yield from child.paths(f"{prefix}.{key}" if prefix else str(key))

    def labels(self) -> Sequence[Any]:
        """The keys of its parts, as a reader would write them."""
        if self.kind in ("tuple", "list", "given", "size"):
            return range(len(self.children))
        return [key[1] if self.kind == "object" else key for key in self.keys]


def where_different(mine: Structure, theirs: Structure, prefix: str = "") -> tuple[str, Structure, Structure]:
    """The path to the first part in which two structures differ, and both parts."""
    if _same_form(mine, theirs):
        for key, a, b in zip(mine.labels(), mine.children, theirs.children, strict=True):
            if a != b:
                return where_different(a, b, f"{prefix}.{key}" if prefix else str(key))
    return prefix, mine, theirs


def with_own_leaves(structure: Structure) -> Structure:
    """The same with a leaf of its own in each place, as `flatten` with `share=False` gives it."""
    numbers = itertools.count()

    def walk(node: Structure) -> Structure:
        if node.kind == "leaf":
            return replace(node, index=next(numbers))
        return replace(node, children=tuple(map(walk, node.children))) if node.children else node

    return walk(structure)


def same_but_for_sharing(a: Structure, b: Structure) -> bool:
    """Whether two structures differ at most in which of their tensors are one object."""
    if a.kind == b.kind == "leaf":
        return True
    if not _same_form(a, b):
        return False
    if not a.children:
        return a == b
    return _same_class(a, b) and all(map(same_but_for_sharing, a.children, b.children))


def _same_form(a: Structure, b: Structure) -> bool:
    """Whether two nodes are of one kind, with the same keys: 1 and True are equal, and two keys."""
    same_keys = a.keys is b.keys or (a.keys == b.keys and all_equal(a.keys, b.keys))
    return a.kind == b.kind and len(a.children) == len(b.children) and same_keys


def _same_class(a: Structure, b: Structure) -> bool:
    """Whether two nodes are of one class, or are one class; by name, where one of them is from a file."""
    mine, theirs = (node.value if isinstance(node.value, type) else node.cls for node in (a, b))
    if a.named or b.named:
        return (a.named or name_of(mine)) == (b.named or name_of(theirs))
    if a.kind == b.kind == "namedtuple" and mine is not None and mine.__module__ == OF_TORCHSCRIPT:
        return name_of(mine) == name_of(theirs)
    return mine is theirs


def name_of(cls: type | None) -> str:
    """A class as files name it."""
    return "" if cls is None else f"{cls.__module__}:{cls.__qualname__}"


CHANGEABLE = ("list", "dict", "object")
Path = tuple[tuple[str, Any], ...]  # steps from a container to one of its parts: ("item", key) or ("attr", name)


@dataclass(frozen=True, slots=True)
class Given:
    """Stands for a part of the call in what is flattened behind it."""

    path: Path


def flatten(
    value: object, *, share: bool = True, given: Mapping[int, Path] | None = None, held: Container[int] = ()
) -> tuple[list[Any], Structure]:
    """Splits a nesting into its tensors and its Structure.

    Args:
        share: a tensor met twice is one leaf, as the caller gets the same object twice again.
        given: paths of objects of the call, by identity.
        held: ids of objects that outlive the call: where they have no tensors, they are themselves.

    Raises:
        CaptureError: the value contains itself, or is nested too deeply.
    """
    walk = _Flattening(share, given or {}, held)
    try:
        structure = walk.node(value)
    except RecursionError:
        raise CaptureError(
            "the inputs or outputs are nested too deeply",
            why="lists in lists, or objects in objects, go down more levels than Python calls of functions can",
            fix="pass the tensors in one list",
        ) from None
    return walk.leaves, structure


class _Flattening:
    """One walk through a nesting.

    NOTE: not a function in a function: one that calls itself is a cycle, which holds all leaves until it is collected.
    """

    def __init__(self, share: bool, given: Mapping[int, Path], held: Container[int]) -> None:
        self.share, self.given, self.held = share, given, held
        self.leaves: list[Any] = []
        self.seen: dict[int, int] = {}
        self.open_ids: set[int] = set()
        self.objects: dict[int, int] = {}
        self.classes: dict[type, Told | None] = dict.fromkeys((tuple, list, dict, OrderedDict))

    def told_of(self, cls: type) -> Told | None:
        """What the objects of a class share."""
        if cls not in self.classes:
            self.classes[cls] = Told(cls) if values_of(cls) else None
        return self.classes[cls]

    def leaf(self, item: Any) -> Structure:
        if self.share and id(item) in self.seen:
            return Structure("leaf", index=self.seen[id(item)])
        self.seen[id(item)] = len(self.leaves)
        self.leaves.append(item)
        return Structure("leaf", index=len(self.leaves) - 1)

    def node(self, item: Any) -> Structure:
        if is_leaf(item):
            return self.leaf(item)
        if isinstance(item, Given) or id(item) in self.given:
            return Structure("given", keys=item.path if isinstance(item, Given) else self.given[id(item)])
        parts = parts_of(item)
        if parts is None:
            return Structure("const", type(item), value=item, contents=told(item))
        if id(item) in self.open_ids:
            raise CaptureError(
                f"a {type(item).__name__} contains itself",
                why="inputs and outputs must be trees of tensors",
                fix="pass the tensors it contains instead",
            )
        objects = self.objects
        if id(item) in objects:
            return Structure("shared", index=objects[id(item)])
        self.open_ids.add(id(item))
        kind, keys, children = parts
        count = len(objects)
        nodes = tuple(map(self.node, children))
        self.open_ids.discard(id(item))
        if kind == "object" and not _holds_leaf(nodes) and (id(item) in self.held or not _is_its_attributes(item)):
            for inner in [key for key, number in objects.items() if number >= count]:
                del objects[inner]
            return Structure("const", type(item), value=item, contents=told(item))
        if kind in CHANGEABLE:
            objects[id(item)] = len(objects)
        return Structure(kind, type(item), keys, nodes, contents=self.told_of(type(item)))


def _holds_leaf(nodes: tuple[Structure, ...]) -> bool:
    return any(node.kind in ("leaf", "shared", "given") or _holds_leaf(node.children) for node in nodes)


def _is_its_attributes(item: Any) -> bool:
    """Whether an object can be made from its attributes, and has nothing else to say of itself."""
    cls: Any = type(item)
    return _is_of_attributes(cls)


@lru_cache(maxsize=1024)
def _is_of_attributes(cls: type) -> bool:
    if cls is SimpleNamespace:
        return True
    if not is_python(cls) and not _is_plain_tuple(cls):
        return False
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    slots = any(vars(base).get("__slots__") for base in cls.__mro__) and not dataclasses.is_dataclass(cls)
    is_new = cls.__new__ in (object.__new__, dict.__new__, OrderedDict.__new__) or _is_plain_tuple(cls)
    return plain and not slots and is_new


@lru_cache(maxsize=1024)
def _is_plain_tuple(cls: type) -> bool:
    """Whether a tuple of this class can be made of its elements past its own `__new__`: none that C makes otherwise."""
    makers = ((base, vars(base).get("__new__")) for base in cls.__mro__)
    return next((base is tuple for base, made_by in makers if isinstance(made_by, BuiltinFunctionType)), False)


def parts_of(item: Any) -> tuple[str, tuple[Any, ...], Sequence[Any]] | None:
    """(kind, keys, children) of a container; None for what is kept as a constant."""
    if isinstance(item, FIXED) or is_symbolic(item):
        return None
    cls: Any = type(item)
    is_more = has_dict(item) and bool(item.__dict__)  # than its items
    if isinstance(item, tuple) and not is_more:
        kind = "namedtuple" if hasattr(cls, "_fields") else "tuple"
        return kind, tuple(getattr(cls, "_fields", ())), elements_of(item)
    if cls is list:
        return "list", (), item
    if cls is dict or (cls is OrderedDict and not is_more):
        return "dict", tuple(item), list(item.values())
    if hasattr(cls, "named_parameters") or isinstance(item, (list, set, deque, bytearray, defaultdict)):
        return None  # an nn.Module in a call is configuration, not data; the others are more than their attributes
    is_tuple = isinstance(item, tuple)
    if not is_tuple and not is_python(cls):
        return None
    held = items_of(item).items() if isinstance(item, dict) else enumerate(elements_of(item) if is_tuple else ())
    items = [(("item", key), child) for key, child in held]
    pairs = items + [(("attr", name), child) for name, child in attributes_of(item).items()]
    if not pairs and not (has_dict(item) and _is_its_attributes(item)):
        return None
    return "object", tuple(key for key, _ in pairs), [child for _, child in pairs]


def at_path(value: Any, path: Path) -> Any:
    """The part of a nesting that a path leads to."""
    for place, key in path:
        if place == "attr":
            value = attributes_of(value)[key]
        else:
            value = dict.__getitem__(value, key) if isinstance(value, dict) else value[key]
    return value


def size_of(node: Structure, tensor: Any) -> Any:
    """The integer that a node of kind `size` stands for."""
    axis, more = node.value
    return tensor.shape[axis] + more


def unflatten(structure: Structure, leaves: Sequence[Any], call: Any = None) -> Any:
    """The inverse of `flatten`: the same types, keys and constants around other tensors.

    Args:
        call: `(args, kwargs)`, where the paths of what is `given` begin, and those of tensors with a size that is
            returned; None if the structure is that of the call itself.
    """
    return _unflatten(structure, leaves, call, [])


def _unflatten(structure: Structure, leaves: Sequence[Any], call: Any, objects: list[Any]) -> Any:
    kind = structure.kind
    if kind == "leaf":
        return leaves[structure.index]
    if kind == "const":
        return structure.value
    if kind == "shared":
        return objects[structure.index]
    if kind == "given":
        return at_path(call, structure.keys)
    if kind == "size":
        return size_of(structure, leaves[structure.index] if call is None else at_path(call, structure.keys))
    children = [_unflatten(child, leaves, call, objects) for child in structure.children]
    made = _made(structure, children)
    if kind in CHANGEABLE:
        objects.append(made)
    return made


class Items(tuple[Any, ...]):
    """A tuple with attributes, of a class that a file names and nobody has."""


def _made(structure: Structure, children: list[Any]) -> Any:
    kind, cls = structure.kind, structure.cls
    if kind == "list":
        return children
    if cls is not None and kind in ("tuple", "namedtuple") and _is_plain_tuple(cls):
        return tuple.__new__(cls, children)
    if kind == "tuple":
        return tuple(children) if cls is None else cls(children)  # such as a torch.Size
    if kind == "object":
        items = [key for place, key in structure.keys if place == "item"]
        unknown = Items if items and items == list(range(len(items))) else SimpleNamespace
        return _rebuild(cls or unknown, structure.keys, children)
    if cls is None:
        raise BundleError("the stored output structure is damaged", why=f"a {kind} without a class")
    if kind == "dict":
        return cls(zip(structure.keys, children, strict=True))
    if kind == "namedtuple":
        return cls(*children)
    raise BundleError("the stored output structure is damaged", why=f"unknown kind {kind!r}")


def _rebuild(cls: type, keys: tuple[Any, ...], children: list[Any]) -> Any:
    # NOTE: never through __init__: it may check, copy or count, and ran already in the user's model.
    if issubclass(cls, tuple):
        items = [child for (place, _), child in zip(keys, children, strict=True) if place == "item"]
        made: Any = tuple.__new__(cls, items)
    else:
        made = cls.__new__(cls)  # type: ignore[call-overload]
    put(made, keys, children)
    return made


def put(target: Any, keys: Sequence[tuple[str, Any]], children: Sequence[Any]) -> None:
    """Makes an object hold these items and attributes."""
    pairs = list(zip(keys, children, strict=True))
    if isinstance(target, dict):
        refill_items(target, {key: child for (place, key), child in pairs if place == "item"})
    for (place, key), child in pairs:
        if place == "attr" or not isinstance(target, (dict, tuple)):
            set_attribute(target, key, child)
