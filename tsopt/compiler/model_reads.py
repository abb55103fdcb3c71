"""What the Python code of a model reads besides its arguments: names, globals, closures, modules.

Code is analyzed, not run: a `getattr` with a computed name is not found, except of flags. Audits cover that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ProxyTypes

import torch
from torch import nn

from tsopt.compiler.calls.snapshot import Wrapper, elements_of, in_slots
from tsopt.compiler.code_names import imported_by, names_in
from tsopt.compiler.contents import HEAP_TYPE, behind_proxy, is_installed, is_library, package_of
from tsopt.compiler.places import ABSENT, InContext, InThread, OfClass

SEARCHED = 4000  # containers and objects that are looked through
PARTS = 64  # of a container that is looked through; of longer ones, only modules are
FIXED = (property, classmethod, staticmethod, BuiltinFunctionType)  # nothing that counts can be set on them
LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, torch.Size, *FIXED)
MOST = frozenset({str, int, float, bool, type(None), torch.Tensor, nn.Parameter})  # of all values
CODE = (FunctionType, property, classmethod, staticmethod)
STEADY = (FunctionType, property, staticmethod, MemberDescriptorType)  # for which a class gives the same each time
BASES = (nn.Module, object)
TABLES = frozenset({"_parameters", "_buffers", "_modules"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# Names that Python sets itself, methods that run when an object is made, and those that no operator, loop or `with`
# calls: all other special methods may run without being named.
SET_BY_PYTHON = frozenset(f"__{name}__" for name in ("doc", "file", "module", "name", "package", "path", "spec"))
MAKES = frozenset({"__init__", "__new__", "__post_init__"})
APART = (
    *("annotate", "annotate_func", "class", "class_getitem", "copy", "deepcopy", "del", "delattr", "dict", "dir"),
    *("format", "getnewargs", "getnewargs_ex", "getstate", "init_subclass", "instancecheck", "prepare", "qualname"),
    *(
        "reduce",
        "reduce_ex",
        "repr",
        "set_name",
        "setstate",
        "sizeof",
        "str",
        "subclasscheck",
        "subclasshook",
        "weakref",
    ),
)
UNREAD = SET_BY_PYTHON | MAKES | {f"__{name}__" for name in APART}


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
        namespaces: of the classes that do not come with torch or Python, which may gain what code has not found there.
    """

    names: set[str] = field(default_factory=set)
    modules: list[nn.Module] = field(default_factory=list)
    places: list[tuple[Mapping[str, Any], str]] = field(default_factory=list)
    classes: list[tuple[type, str]] = field(default_factory=list)
    cells: list[CellType] = field(default_factory=list)
    functions: list[FunctionType] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    namespaces: list[Mapping[str, Any]] = field(default_factory=list)


def reads_of(model: Any) -> Reads:
    """What a module, with all below it, or a function reads."""
    return _Search().run(model)


class _Search:
    def __init__(self) -> None:
        self.found = Reads(names={"training", "forward"})
        self._seen: set[Any] = set()
        self._kept: list[Any] = []  # ids are those of what is there
        self._todo: list[FunctionType] = []
        self._parts_left: list[Any] = []  # not by recursion: what is looked through may be chained
        self._searched = 0
        self._names: dict[int, frozenset[str]] = {}  # in each code
        # Whose attributes count, where code reads their names: classes, and what Python modules and functions hold.
        self._classes: dict[type, frozenset[str]] = {}
        self._namespaces: list[dict[str, Any]] = []

    def run(self, model: Any) -> Reads:
        self._value(model)
        for hooks in HOOKS:
            self._hooks(getattr(nn.modules.module, f"_global{hooks}"))
        known = -1
        while known != len(self._seen):  # a method that is reached may bring names of others
            known = len(self._seen)
            while self._todo or self._parts_left:
                if self._parts_left:
                    self._value(self._parts_left.pop())
                else:
                    self._function(self._todo.pop())
            for cls, names in list(self._classes.items()):
                for name in sorted(names & self.found.names):
                    self._class_name(cls, name)
            for namespace in list(self._namespaces):
                self._places(namespace, self.found.names, self.found.names)
        return self.found

    def _is_new(self, *key: Any) -> bool:
        ids = tuple([part if type(part) is str else id(part) for part in key])
        if ids in self._seen:
            return False
        self._seen.add(ids)
        self._kept.append(key)
        return True

    def _value(self, value: Any) -> None:
        """Follows what can be followed."""
        kind = type(value)
        if kind in MOST or kind in ProxyTypes:
            return
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, FunctionType):
            self._todo.append(value)
        elif isinstance(value, MethodType):
            self._value(value.__self__)
            self._value(value.__func__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._value(part)
            self.found.held += [*value.args, value.keywords]
        elif isinstance(value, (staticmethod, classmethod)):
            self._value(value.__func__)
        elif isinstance(value, property):
            for function in (value.fget, value.fset, value.fdel):
                self._value(function)
        elif isinstance(value, type):
            self._class(value, is_held=False)
        elif isinstance(value, ModuleType):
            if not _is_torchs(value):
                self._namespace(vars(value))
        elif isinstance(value, ContextVar):
            if self._is_new(value):
                self.found.places.append((InContext(value), value.name))
                self._parts_left.append(value.get(None))
        else:
            self._parts(value)

    def _parts(self, value: Any) -> None:
        """Code and modules below what code computes with: in a list, or in the attributes of an object."""
        if isinstance(value, LEAVES) or self._searched >= SEARCHED:
            return
        value = behind_proxy(value)
        cls = type(value)
        if isinstance(value, Wrapper):  # a hybrid of an object
            self._value(value.__wrapped__)  # type: ignore[attr-defined]
            return
        is_container, is_users = isinstance(value, (list, tuple, set, dict)), not is_library(cls.__module__)
        parts = list(dict.values(value)) if isinstance(value, dict) else elements_of(value) if is_container else []
        attributes = _attributes(value)
        if is_users:
            self._class(cls, is_held=True)
        if (is_container and not parts and not attributes) or not self._is_new(value):
            return
        self._searched += 1
        if isinstance(value, threading.local):
            self.found.places.append((InThread(value, self.found.names), *InThread.names))
        elif is_container and attributes:
            self._namespace(attributes)
        elif is_users and not is_container:
            self.found.objects.append(value)
            attributes = attributes | in_slots(value)
        for some in (parts, list(attributes.values())):
            kept = some if len(some) <= PARTS else [item for item in some if issubclass(type(item), nn.Module)]
            self._parts_left += reversed(kept)

    def _class(self, cls: type, *, is_held: bool) -> None:
        """The attributes of a class that is made in Python, of those that are read by name.

        Of the user's own classes also operators and other special methods, which run without being named. There are
        too many of them in an installed package, and each costs time in each call.

        Args:
            is_held: the code has an object of the class; otherwise it has the class, and may make objects of it.
        """
        if not cls.__flags__ & HEAP_TYPE or not self._is_new(cls, "held" if is_held else "named"):
            return
        if type(cls) is not type:
            self._class(type(cls), is_held=True)
        of_users = [base for base in _made_of(cls) if not is_library(base.__module__)]
        self.found.namespaces += [vars(base) for base in of_users if self._is_new(base, "namespace")]
        own = [base for base in of_users if not is_installed(base.__module__)]
        with_code = is_held or bool(own)
        bases = _made_of(cls) if issubclass(cls, nn.Module) else of_users  # `forward` of torch's modules calls others
        attributes = [*chain.from_iterable(vars(base).items() for base in bases)]
        names = {name for name, value in attributes if with_code or not isinstance(value, CODE)} - UNREAD
        self._classes[cls] = self._classes.get(cls, frozenset()) | names
        # A module that is named is seldom made in a call, but often asked for by `isinstance`.
        unread = UNREAD if is_held or issubclass(cls, nn.Module) else UNREAD - MAKES
        unread = unread | {"__call__"} if issubclass(cls, type) else unread  # of a metaclass: it makes objects
        for name, value in chain.from_iterable(list(vars(base).items()) for base in own):
            if name.startswith("__") and name not in unread and isinstance(value, CODE):
                self._class_name(cls, name)

    def _module(self, root: nn.Module) -> None:
        for module in root.modules():
            if not self._is_new(module):
                continue
            self.found.modules.append(module)
            self._class(type(module), is_held=True)
            for hooks in HOOKS:
                self._hooks(getattr(module, hooks, {}))
            for name, value in [*module.__dict__.items(), *in_slots(module).items()]:
                if name not in TABLES and name not in HOOKS:
                    self._value(value)

    def _hooks(self, hooks: Mapping[int, Any]) -> None:
        for hook in list(hooks.values()):
            self._value(hook)
            self.found.objects.append(hook.__self__ if isinstance(hook, MethodType) else hook)

    def _class_name(self, cls: type, name: str) -> None:
        """An attribute of a class wherever it is defined, for what overrides another one may call it."""
        if not self._is_new(cls, name):
            return
        defining = [base for base in _made_of(cls) if name in vars(base)]
        for base in defining:
            owner, value, installed = base, vars(base)[name], is_installed(base.__module__)
            self._value(value)
            if base is defining[0]:
                owner = cls  # which may get one of its own
            elif installed and not isinstance(value, CODE):
                continue
            # Of torch's own classes only what users are known to replace: there are many, and each costs time in each
            # call.
            if name != "forward" and package_of(owner.__module__) == "torch":
                continue
            if type(value) in STEADY or not hasattr(type(value), "__get__"):
                self.found.classes.append((owner, name))
            elif not installed:
                self.found.places.append((OfClass(owner, name), name))

    def _function(self, function: FunctionType) -> None:
        if not self._is_new(function):
            return
        made_in, code = function.__globals__.get("__name__"), function.__code__
        if package_of(made_in) == "tsopt":  # a hybrid, of which the model reads no more than what it was made of
            self._value(vars(function).get("__wrapped__"))
            self._namespace(vars(function))
            return
        if id(code) not in self._names:
            self._names[id(code)] = frozenset(names_in(code))
        names = self._names[id(code)]
        self.found.names |= names
        is_users = not is_library(function.__module__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":  # of which only `super` is asked
                self._cell(cell, is_users)
        if is_library(made_in):  # also what a decorator of torch puts around a function of the user's
            return
        self.found.functions.append(function)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for value in defaults:
            self._value(value)
        self.found.held += defaults
        if vars(function):
            self._namespace(vars(function))
        self._places(function.__globals__, names, names)
        # Installed packages import a great deal for cases that are none here.
        for module, imported in () if is_installed(made_in) else imported_by(function):
            if not _is_torchs(module):
                self._places(vars(module), imported or names, names)

    def _cell(self, cell: CellType, is_users: bool) -> None:
        value = content_of(cell)
        if value is ABSENT:
            return
        self._value(value)
        if is_users and self._is_new(cell):
            self.found.cells.append(cell)

    def _namespace(self, namespace: dict[str, Any]) -> None:
        """The attributes of something that is reached as a value: which functions will read them is not known."""
        if self._is_new(namespace):
            self._namespaces.append(namespace)

    def _places(self, namespace: dict[str, Any], names: Set[str], below: Set[str]) -> None:
        """The globals of a function, or the attributes of a Python module or a function, that have these names.

        Args:
            below: names that count of what Python modules among them hold.
        """
        of_library = is_library(namespace.get("__name__"))
        for name in sorted((names & namespace.keys()) - SET_BY_PYTHON):
            value = namespace[name]
            if of_library and isinstance(value, (FunctionType, BuiltinFunctionType, type)):
                continue  # which nobody replaces
            if isinstance(value, ModuleType):
                if _is_torchs(value):
                    continue
                if below is self.found.names:  # which will be more
                    self._namespace(vars(value))
                elif self._is_new(value, below):
                    self._places(vars(value), below, below)
                if not is_library(vars(value).get("__name__")) and self._is_new(namespace, name):
                    self.found.places.append((namespace, name))
            elif self._is_new(namespace, name):
                self.found.places.append((namespace, name))
                self._value(value)


def content_of(cell: CellType) -> Any:
    """What a variable of a closure holds; ABSENT while it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _made_of(cls: type) -> list[type]:
    """A class and its bases, those of C and torch's module apart."""
    return [base for base in cls.__mro__ if base.__flags__ & HEAP_TYPE and base not in BASES]


def _is_torchs(module: ModuleType) -> bool:
    return package_of(vars(module).get("__name__")) in ("torch", "builtins")


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object itself; none of what makes them when it is asked."""
    found = getattr(value, "__dict__", None)
    return found if type(found) is dict else {}
