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

from tsopt.compiler.calls.snapshot import (
    FIXED,
    attributes_of,
    has_dict,
    holders,
    is_leaf,
    is_python,
    is_symbolic,
    items_of,
    refill_items,
    set_attribute,
    told,
)
from tsopt.errors import BundleError, CaptureError

OF_TORCHSCRIPT = "torch._jit_internal"  # where it makes the class of a NamedTuple, in each call a new one


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """One node of a nesting.

    kind is `leaf` (a tensor, `index` into the flat list), `const` (a value kept as it was), `tuple`,
    `list`, `dict`, `namedtuple` or `object` (dataclasses, model outputs, caches: items of the mapping,
    if it is one, then attributes). Two structures are equal when the same call would be made: constants
    count by type and value. A list, a dict or an object met twice is `shared` the second time, by the number of the
    first; one of the call itself is `given`, and `keys` are the path to it. An integer that goes along with a size of a
    tensor of the call is a `size`: `index` and `keys` are those of the tensor, `value` its axis and what is added.
    """

    kind: str
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    index: int = -1
    value: Any = None
    contents: str = ""
    named: str = ""  # the class of an object, or one that is a constant, where a file names what cannot be had

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure) or self._key() != other._key():
            return False
        return _same_class(self, other) and all(map(_same_key, self.keys, other.keys))

    def __hash__(self) -> int:
        return hash((self.kind, self.keys, self.index, len(self.children)))

    def _key(self) -> tuple[Any, ...]:
        by_name = self.named or isinstance(self.value, type)
        value = _identity(self.value) if self.kind in ("const", "size") and not by_name else None
        return self.kind, self.keys, self.children, self.index, value, self.contents

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

    def walk(self) -> Iterator[Structure]:
        """Itself and all that is below it."""
        yield self
        for child in self.children:
            yield from child.walk()

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
    if (mine.kind, mine.keys, len(mine.children)) == (theirs.kind, theirs.keys, len(theirs.children)):
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
    if (a.kind, a.keys, len(a.children)) != (b.kind, b.keys, len(b.children)):
        return False
    if not a.children:
        return a == b
    return _same_class(a, b) and all(map(same_but_for_sharing, a.children, b.children))


def _same_key(mine: Any, theirs: Any) -> bool:
    """Whether keys that are equal are of the same type: a model can tell 1, 1.0 and True apart."""
    if type(mine) is not type(theirs):
        return False
    if type(mine) is tuple:
        return all(map(_same_key, mine, theirs))
    return bool(_identity(mine) == _identity(theirs))


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


def _identity(value: Any) -> Any:
    """What a constant is compared by: bits for floats (-0.0 is not 0.0, NaN is NaN), itself for an object."""
    if isinstance(value, (float, complex)):
        return repr(value)
    return value if isinstance(value, FIXED) or next(holders(value), None) is None else id(value)


def _const(value: Any) -> Structure:
    """A constant, with what it holds now: a configuration object that is changed later is another constant."""
    simple = isinstance(value, FIXED) or type(value).__module__ == "torch"
    return Structure("const", type(value), value=value, contents="" if simple else told(value))


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
            return _const(item)
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
            return _const(item)
        if kind in CHANGEABLE:
            objects[id(item)] = len(objects)
        return Structure(kind, type(item), keys, nodes)


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
    if not is_python(cls):
        return False
    plain = all(getattr(cls, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__"))
    slots = any(vars(base).get("__slots__") for base in cls.__mro__) and not dataclasses.is_dataclass(cls)
    return plain and not slots and cls.__new__ in (object.__new__, dict.__new__, OrderedDict.__new__)


def parts_of(item: Any) -> tuple[str, tuple[Any, ...], Sequence[Any]] | None:
    """(kind, keys, children) of a container; None for what is kept as a constant."""
    if isinstance(item, FIXED) or is_symbolic(item):
        return None
    cls: Any = type(item)
    if isinstance(item, tuple):
        if has_dict(item) and item.__dict__:
            return None  # more than its items
        return ("namedtuple" if hasattr(cls, "_fields") else "tuple"), tuple(getattr(cls, "_fields", ())), item
    if cls is list:
        return "list", (), item
    if cls in (dict, OrderedDict):
        return "dict", tuple(item), list(item.values())
    if hasattr(cls, "named_parameters") or isinstance(item, (list, set, deque, bytearray, defaultdict)):
        return None  # an nn.Module in a call is configuration, not data; the others are more than their attributes
    if not is_python(cls):
        return None
    items = [(("item", key), child) for key, child in items_of(item).items()] if isinstance(item, dict) else []
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


def _made(structure: Structure, children: list[Any]) -> Any:
    kind, cls = structure.kind, structure.cls
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children) if cls is None else _tuple(cls, children)
    if kind == "object":
        return _rebuild(cls or SimpleNamespace, structure.keys, children)
    if cls is None:
        raise BundleError("the stored output structure is damaged", why=f"a {kind} without a class")
    if kind == "dict":
        return cls(zip(structure.keys, children, strict=True))
    if kind == "namedtuple":
        return _tuple(cls, children)
    raise BundleError("the stored output structure is damaged", why=f"unknown kind {kind!r}")


def _tuple(cls: Any, children: list[Any]) -> Any:
    # NOTE: by tuple, torch.Size, or whatever else is of C: a `__new__` of the user's may compute, and ran already.
    news = (vars(base).get("__new__") for base in cls.__mro__)
    return next(new for new in news if isinstance(new, BuiltinFunctionType))(cls, children)


def _rebuild(cls: type, keys: tuple[Any, ...], children: list[Any]) -> Any:
    # NOTE: never through __init__: it may check, copy or count, and ran already in the user's model.
    made: Any = cls.__new__(cls)  # type: ignore[call-overload]
    put(made, keys, children)
    return made


def put(target: Any, keys: Sequence[tuple[str, Any]], children: Sequence[Any]) -> None:
    """Makes an object hold these items and attributes."""
    pairs = list(zip(keys, children, strict=True))
    if isinstance(target, dict):
        refill_items(target, {key: child for (place, key), child in pairs if place == "item"})
    for (place, key), child in pairs:
        if place == "attr" or not isinstance(target, dict):
            set_attribute(target, key, child)
