"""A shadow copy of a model: separate modules, containers and plain objects around the same parameters.

Tracing or calling the shadow changes nothing that a call of the model in another thread could see: swapped parameters,
toggled flags, incremented counters, written buffers.

Modules, containers and objects of plain Python classes are copied, by their attributes. Functions, methods and tuples
are copied if they lead to a copied module. What only its own class could copy (locks, generators, files, TorchScript,
C++ objects) is shared, and so are classes and objects from the standard library.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import (
    FIXED,
    SCALARS,
    attributes_of,
    elements_of,
    items_of,
    refill_items,
    set_attribute,
    without_hybrid,
)
from tsopt.compiler.calls.structure import Structure
from tsopt.compiler.graph.program import Program
from tsopt.compiler.tensor_life import LIFE

log = logging.getLogger("tsopt")
# What makes instances of classes whose instances are their attributes, and elements for containers.
PLAIN_NEW: tuple[Any, ...] = (object.__new__, dict.__new__, OrderedDict.__new__, list.__new__, set.__new__)
CONTAINERS = (dict, list, set, deque)
LINKS = (
    tuple,
    frozenset,
    MethodType,
    partial,
    FunctionType,
    CellType,
    weakref.ref,
)  # copied where they lead to modules
ATOMS = (*SCALARS, torch.Tensor, type)
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class of Python's, or one of C that has been made at run time


class Shadow:
    """A model, copied without its tensors; buffers have memory of their own, with the same values.

    Attributes:
        called: the shadow, called as the model is; the model itself where it has no modules.
    """

    def __init__(self, model: Callable[..., Any], *, written: Iterable[torch.Tensor] = ()) -> None:
        """Copies a model.

        Args:
            written: parameters that the model writes in a call (an embedding with max_norm), to be copied as well.

        Raises:
            TypeError: a module cannot be copied.
            Exception: whatever an object does that cannot be copied all the same.
        """
        found, holders = _reachable(model)
        modules = [item for item in found.values() if isinstance(item, nn.Module)]
        if any(hasattr(type(module), "__del__") for module in modules):
            raise TypeError("a module defines __del__, which would run for the copy as well")
        self.called = model
        self._found = found  # ids are theirs for as long as they live
        self._leads = _leading(map(id, modules), holders)
        self._copies: dict[int, Any] = {}  # by the id of the original
        self._originals: dict[int, Any] = {}  # by the id of the copy
        self._tensors: dict[int, torch.Tensor] = {}  # by the id of one, the other, in both directions
        self._memory: dict[int, torch.UntypedStorage] = {}  # by address, the other's: the model's or the shadow's
        buffers = [tensor for module in modules for tensor in module._buffers.values() if tensor is not None]
        for tensor in filter(_is_plain, (*buffers, *written)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in self._memory:
                copy = storage.clone()
                self._memory[storage.data_ptr()], self._memory[copy.data_ptr()] = copy, storage
        if modules:
            self.called = self._copy(model)

    def __bool__(self) -> bool:
        """Whether it is not the model itself."""
        return bool(self._copies)

    def original(self, item: Any) -> Any:
        """What something of the shadow is in the model; anything else is itself."""
        return self._originals.get(id(item), item)

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor of the model is in the shadow, and the other way round; any other is itself."""
        return self._tensor(tensor)

    def holds(self, item: Any) -> bool:
        """Whether something of the model has a copy here."""
        return id(item) in self._copies

    def linked(self, program: Program) -> Program:
        """A program that was captured from the shadow, as if from the model: its weights, its state, its objects."""
        signature = program.signature
        effects = tuple(replace(effect, parts=self._linked(effect.parts)) for effect in signature.effects)
        return replace(
            program,
            weights={name: self._tensor(weight) for name, weight in program.weights.items()},
            state={name: self._tensor(tensor) for name, tensor in program.state.items()},
            returned_weights=tuple(map(self._tensor, program.returned_weights)),
            signature=replace(signature, result=self._linked(signature.result), effects=effects),
        )

    def _linked(self, structure: Structure) -> Structure:
        children = tuple(map(self._linked, structure.children))
        return replace(structure, children=children, value=self.original(structure.value))

    def _copy(self, item: Any) -> Any:
        """The copy of what is copied, made once; anything else itself."""
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if id(item) in self._copies:
            return self._copies[id(item)]
        if _is_link(item):
            return self._link(item) if id(item) in self._leads else item
        if not _is_copied(item):
            return item
        made = self._enter(item, _empty(item))
        if isinstance(item, dict):
            refill_items(made, {self._copy(key): self._copy(value) for key, value in items_of(item).items()})
        elif isinstance(item, (list, deque)):
            (list if isinstance(item, list) else deque).extend(made, map(self._copy, elements_of(item)))
        elif isinstance(item, set):
            set.update(made, map(self._copy, elements_of(item)))
        for name, value in attributes_of(item).items():
            set_attribute(made, name, self._copy(value))
        return made

    def _link(self, item: Any) -> Any:
        """A copy of what cannot change, but leads to what can."""
        if isinstance(item, CellType):
            cell = self._enter(item, CellType())
            cell.cell_contents = self._copy(item.cell_contents)
            return cell
        if isinstance(item, FunctionType) and without_hybrid(item) is not item:
            # The copy is never compiled: compiled forms are made for the original.
            return self._copies.setdefault(id(item), self._copy(without_hybrid(item)))
        if isinstance(item, FunctionType):
            cells = tuple(map(self._copy, item.__closure__ or ())) or None
            made: Any = FunctionType(item.__code__, item.__globals__, item.__name__, None, cells)
        elif isinstance(item, MethodType):
            made = MethodType(self._copy(item.__func__), self._copy(item.__self__))
        elif isinstance(item, partial):
            made = type(item)(self._copy(item.func), *self._copy(item.args), **self._copy(item.keywords))
        elif isinstance(item, weakref.ref):
            made = weakref.ref(self._copy(item()))
        elif isinstance(item, tuple):
            made = tuple.__new__(type(item), map(self._copy, elements_of(item)))
        else:
            made = frozenset.__new__(type(item), map(self._copy, elements_of(item)))
        if id(item) in self._copies:  # what it holds holds it as well, and has come here first
            return self._copies[id(item)]
        self._enter(item, made)
        if isinstance(item, FunctionType):
            made.__qualname__, made.__module__, made.__doc__ = item.__qualname__, item.__module__, item.__doc__
            made.__defaults__ = self._copy(item.__defaults__)
            made.__kwdefaults__ = self._copy(item.__kwdefaults__)
            made.__annotations__ = item.__annotations__
            made.__dict__.update({name: self._copy(value) for name, value in item.__dict__.items()})
        return made

    def _enter(self, item: Any, made: Any) -> Any:
        self._copies[id(item)], self._originals[id(made)] = made, item
        return made

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or where it lies in memory that is copied, the same place in the other's."""
        if id(tensor) in self._tensors or not self._memory or not _is_plain(tensor):
            return self._tensors.get(id(tensor), tensor)
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            made.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=False)
            made.requires_grad_(tensor.requires_grad)
        made.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != LIFE})
        self._tensors[id(tensor)], self._tensors[id(made)] = made, tensor
        return made


def shadow_of(model: Callable[..., Any], *, written: Iterable[torch.Tensor] = ()) -> Shadow | None:
    """The shadow of a model; None where it has no modules, or holds something that cannot be copied after all."""
    try:
        shadow = Shadow(model, written=written)
    except Exception as error:  # whatever a class of the user's does
        log.info("cannot make a shadow copy of a %s: %s: %s", type(model).__name__, type(error).__name__, error)
        return None
    return shadow or None


def _is_link(item: Any) -> bool:
    return isinstance(item, LINKS) or type(item) is weakref.ref


def _is_copied(item: Any) -> bool:
    """Whether all that an object is are its attributes and elements, and it is not Python's own or torch's."""
    if isinstance(item, nn.Module):
        return not isinstance(item, torch.jit.ScriptModule)
    cls: type = type(item)
    return _is_container(cls) or (_is_plain_class(cls) and bool(attributes_of(item)))


@lru_cache(maxsize=1024)
def _is_container(cls: type) -> bool:
    if cls in (deque, defaultdict):
        return True
    return issubclass(cls, CONTAINERS) and cls.__new__ in PLAIN_NEW


@lru_cache(maxsize=1024)
def _is_plain_class(cls: type) -> bool:
    if cls is SimpleNamespace:
        return True
    package = cls.__module__.partition(".")[0]
    known = issubclass(cls, FIXED) or package in sys.stdlib_module_names or package == "torch"
    return not known and _is_python(cls) and not hasattr(cls, "__del__")  # it would close what both hold


def _is_python(cls: type) -> bool:
    """Whether the memory of an instance is its attributes: nothing that C has laid out."""
    slots = sum(len(vars(base).get("__slots__", ())) for base in cls.__mro__ if base is not object)
    heap = all(base.__flags__ & HEAP_TYPE for base in cls.__mro__ if base is not object)
    return heap and cls.__new__ in PLAIN_NEW[:1] and cls.__basicsize__ <= object.__basicsize__ + 8 * (slots + 2)


def _empty(item: Any) -> Any:
    """An object of the same class, without attributes and elements."""
    cls: Any = type(item)
    if cls is deque:
        return deque(maxlen=item.maxlen)
    if cls is defaultdict:
        return defaultdict(item.default_factory)
    return object.__new__(cls) if isinstance(item, nn.Module) else cls.__new__(cls)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a piece of memory that others may lie in as well."""
    known = type(tensor) in (torch.Tensor, nn.Parameter) or type(tensor) is getattr(nn, "Buffer", None)
    return known and tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def _parts(item: Any) -> Iterator[Any]:
    """What an object leads to."""
    if isinstance(item, FunctionType):
        yield from (*(item.__closure__ or ()), item.__defaults__, item.__kwdefaults__, *item.__dict__.values())
    elif isinstance(item, CellType):
        with contextlib.suppress(ValueError):  # a name that has no value yet
            yield item.cell_contents
    elif isinstance(item, MethodType):
        yield from (item.__func__, item.__self__)
    elif isinstance(item, partial):
        yield from (item.func, item.args, item.keywords)
    elif isinstance(item, weakref.ref):
        yield item()
    elif isinstance(item, (tuple, frozenset)):
        yield from elements_of(item)
    else:
        if isinstance(item, dict):
            yield from (*items_of(item), *items_of(item).values())
        elif isinstance(item, CONTAINERS):
            yield from elements_of(item)
        yield from attributes_of(item).values()


def _reachable(model: Any) -> tuple[dict[int, Any], dict[int, list[int]]]:
    """All that can be copied below a model, by identity, and by whom each of it is held."""
    found: dict[int, Any] = {}
    holders: dict[int, list[int]] = {}
    todo: list[tuple[Any, int]] = [(model, 0)]
    while todo:
        item, holder = todo.pop()
        if isinstance(item, ATOMS) or not (_is_link(item) or _is_copied(item)):
            continue
        holders.setdefault(id(item), []).append(holder)
        if id(item) not in found:
            found[id(item)] = item
            todo += [(part, id(item)) for part in _parts(item)]
    return found, holders


def _leading(to: Iterable[int], holders: Mapping[int, Sequence[int]]) -> set[int]:
    """Everything that holds one of these, directly or indirectly."""
    todo, seen = list(to), set[int]()
    while todo:
        for holder in holders.get(todo.pop(), ()):
            if holder not in seen:
                seen.add(holder)
                todo.append(holder)
    return seen
