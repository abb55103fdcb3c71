"""What the Python code of a model reads besides its arguments: names, globals, closures, modules.

Code is analyzed, not run: a `getattr` with a computed name is not found, except of flags. Audits cover that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import elements_of
from tsopt.compiler.contents import HEAP_TYPE, is_library

SEARCHED = 4000  # containers and objects that are looked through
PARTS = 64  # of a container that is looked through
LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size)
CODE = (FunctionType, property, classmethod, staticmethod, MemberDescriptorType)
BASES = (nn.Module, object)
ABSENT = object()  # where a name has no value
TABLES = frozenset({"_parameters", "_buffers", "_modules"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


@dataclass(slots=True)
class Reads:
    """What was found.

    Attributes:
        names: of attributes and globals.
        modules: of the model, and those that its functions reach around them.
        places: dictionaries of globals and Python modules, with the names that are read from each; `classes` likewise.
        cells: of closures.
        functions: that do not come with torch.
        objects: plain ones, whose attributes its functions may read, and hooks.
        held: values that functions compute with beside their arguments: defaults, arguments of partial functions.
    """

    names: set[str] = field(default_factory=set)
    modules: list[nn.Module] = field(default_factory=list)
    places: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    classes: list[tuple[type, str]] = field(default_factory=list)
    cells: list[CellType] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)


def reads_of(model: Any) -> Reads:
    """What a module, with all below it, or a function reads."""
    return _Search().run(model)


class _Search:
    def __init__(self) -> None:
        self.found = Reads(names={"training", "forward"})
        self._seen: set[Any] = set()
        self._kept: list[Any] = []  # ids are those of what is there
        self._todo: list[tuple[FunctionType, type | None]] = []
        self._parts_left: list[Any] = []  # not by recursion: what is looked through may be chained
        self._searched = 0
        self._classes: dict[type, frozenset[str]] = {}  # reached by a value or by name, and their attributes

    def run(self, model: Any) -> Reads:
        self._value(model, None)
        known = -1
        while known != len(self._seen):  # a method that is reached may bring names of others
            known = len(self._seen)
            while self._todo or self._parts_left:
                if self._parts_left:
                    self._value(self._parts_left.pop(), None)
                else:
                    self._function(*self._todo.pop())
            for cls, names in list(self._classes.items()):
                for name in sorted(names & self.found.names):
                    self._class_name(cls, name)
        return self.found

    def _is_new(self, *key: Any) -> bool:
        ids = tuple(map(id, key))
        if ids in self._seen:
            return False
        self._seen.add(ids)
        self._kept.append(key)
        return True

    def _value(self, value: Any, cls: type | None) -> bool:
        """Follows what can be followed; whether it is code or a module, and not what code computes with."""
        if type(value) in ProxyTypes:
            return False
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, FunctionType):
            self._todo.append((value, cls))
        elif isinstance(value, MethodType):
            self._value(value.__self__, cls)
            self._value(value.__func__, type(value.__self__))
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._value(part, cls)
            self.found.held += [*value.args, *value.keywords.values()]
        elif isinstance(value, (staticmethod, classmethod)):
            self._value(value.__func__, cls)
        elif isinstance(value, property):
            self._value(value.fget, cls)
        elif callable(value) and "__wrapped__" in _namespace(value):  # what answers to any name would never end
            if self._is_new(value):
                self._value(_namespace(value)["__wrapped__"], cls)
        elif isinstance(value, type):
            self._class(value, code=False)
        elif isinstance(value, ModuleType):
            return True
        else:
            self._parts(value)
            return callable(value) and not hasattr(value, "__dict__")
        return True

    def _parts(self, value: Any) -> None:
        """Code and modules below what code computes with: in a list, or an object that can be called."""
        if isinstance(value, LEAVES) or self._searched >= SEARCHED:
            return
        is_container = isinstance(value, (list, tuple, set, dict))
        parts = list(dict.values(value)) if isinstance(value, dict) else elements_of(value) if is_container else []
        if (is_container and not parts) or not self._is_new(value):
            return
        self._searched += 1
        if not is_container:
            if not is_library(type(value).__module__):
                if isinstance(vars(type(value)).get("__call__"), FunctionType):
                    self._class_name(type(value), "__call__")
                self._class(type(value), code=True)
                self.found.objects.append(value)
            parts = list(_namespace(value).values())
        self._parts_left += reversed(parts) if len(parts) <= PARTS else ()

    def _class(self, cls: type, *, code: bool) -> None:
        """The attributes of a class made in Python, of those that are read by name; nn.Modules have their own way.

        Args:
            code: its methods are called on an object that was found; otherwise only its values may be read.
        """
        if not cls.__flags__ & HEAP_TYPE or issubclass(cls, (nn.Module, torch.Tensor)):
            return
        made = [base for base in cls.__mro__ if base.__flags__ & HEAP_TYPE and not is_library(base.__module__)]
        attributes = {name: value for base in made for name, value in vars(base).items() if not name.startswith("__")}
        names = {name for name, value in attributes.items() if code or not isinstance(value, CODE)}
        self._classes[cls] = self._classes.get(cls, frozenset()) | names

    def _module(self, root: nn.Module) -> None:
        for module in root.modules():
            if not self._is_new(module):
                continue
            self.found.modules.append(module)
            cls = type(module)
            self._class_name(cls, "forward")
            for hooks in HOOKS:
                for hook in list(getattr(module, hooks, {}).values()):
                    self._value(hook, None)
                    self.found.objects.append(hook.__self__ if isinstance(hook, MethodType) else hook)
            for name, value in list(module.__dict__.items()):
                if name not in TABLES and name not in HOOKS:
                    self._value(value, cls)

    def _class_name(self, cls: type, name: str) -> None:
        """An attribute of a class, where it is defined."""
        base = next((base for base in cls.__mro__ if name in vars(base)), None)
        if base is None or base in BASES or not self._is_new(cls, name):
            return
        self._value(vars(base)[name], cls)
        if isinstance(vars(base)[name], classmethod) or name in ("__dict__", "__class__"):
            return  # what is read from the class is another object each time
        if not hasattr(cls, name):
            return  # a descriptor that answers for objects only, as `forward` of torch.jit.ScriptModule does
        # Of torch's own classes only what users are known to replace: there are many, and each costs time in each call.
        if name == "forward" or cls.__module__.partition(".")[0] != "torch":
            self.found.classes.append((cls, name))

    def _function(self, function: FunctionType, cls: type | None) -> None:
        if not self._is_new(function.__code__, cls):
            return
        names = set(_names_in(function.__code__))
        self.found.names |= names
        for name in names if cls is not None else ():
            assert cls is not None
            self._class_name(cls, name)
        if is_library(function.__module__):
            return
        self.found.functions.append(function)
        for cell in function.__closure__ or ():
            self._cell(cell, cls)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in defaults:
            self._value(value, None)
        self.found.held += defaults
        for name in names & function.__globals__.keys():
            self._global(function.__globals__, name, names)

    def _cell(self, cell: CellType, cls: type | None) -> None:
        value = content_of(cell)
        if value is ABSENT:
            return
        self._value(value, cls)
        if self._is_new(cell):
            self.found.cells.append(cell)

    def _global(self, place: dict[str, Any], name: str, names: set[str]) -> None:
        value = place[name]
        if not self._is_new(place, name):
            return
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] not in ("torch", "builtins"):
                for inner in names & vars(value).keys():
                    if not isinstance(vars(value)[inner], ModuleType):
                        self._global(vars(value), inner, names)
            return
        if not self._value(value, None) or isinstance(value, (FunctionType, nn.Module)):
            self.found.places.append((place, name))


def content_of(cell: CellType) -> Any:
    """What a variable of a closure holds; ABSENT while it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _namespace(value: Any) -> dict[str, Any]:
    """The attributes of an object itself; none of what makes them when it is asked."""
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else {}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():  # as in getattr(self, "scale", 1.0)
            yield constant
