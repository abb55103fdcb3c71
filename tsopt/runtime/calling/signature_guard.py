"""The fast guard: straight-line code, generated from the Signature, that decides whether a call matches it.

A call that it does not accept goes to the thorough check, which explains the mismatch. Straight-line code, because on a
model that takes ten microseconds every nested call costs one percent.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

from tsopt.compiler.calls.memory import is_repeated, overlap
from tsopt.compiler.calls.signature import DERIVED, Dim, Input, Output, Signature, dim_of
from tsopt.compiler.calls.snapshot import attributes_of, has_only_dict, items_of
from tsopt.compiler.calls.structure import Structure
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.capture.question import Question
from tsopt.runtime.calling import ambient

KNOWN_SIZES = 1024  # for which it is remembered whether the conditions on them hold
Leaves = Callable[[Sequence[Any], Mapping[str, Any]], Sequence[Any] | None]


def leaves_of(signature: Signature) -> Leaves:
    """A function of `(args, kwargs)`: the tensors of a call that fits, in signature order; None for any other call."""
    writer = _Writer(signature)
    if not writer.call():
        return lambda args, kwargs: None
    writer.checks()
    names = ", ".join(f"v{i}" for i in range(len(signature.user_inputs)))
    return writer.function("leaves", "args, kwargs", [f"return ({names}{',' if names else ''})"])


def quick_call(
    signature: Signature,
    run: Callable[[Sequence[Any]], Sequence[Any]],
    broken: Callable[[Sequence[Any]], Exception],
) -> Callable[[Any], Any] | None:
    """The whole call of a model that takes one tensor and returns one; None from it: the call does not fit.

    None for a model of another form.

    Args:
        run: flat tensors in and out.
        broken: the error about outputs that are not as promised.
    """
    args, kwargs = signature.outer.children
    if [child.kind for child in args.children] != ["leaf"] or kwargs.children:
        return None
    if signature.result.kind != "leaf" or signature.effects or len(signature.inputs) != 1 or signature.writes:
        return None
    if signature.outputs[0].view is not None or signature.outputs[0].lasting:
        return None
    writer = _Writer(signature)
    writer.checks()
    failed = " or ".join(["len(found) != 1", *writer.differs("found[0]", signature.outputs[0])])
    end = [f"if {failed}:", "    raise broken(found)", "return found[0]"]
    run_it = "found = run((v0,))"
    return writer.function("quick", "v0", [run_it, *end], run=run, broken=broken)


def watcher() -> Callable[[], bool]:
    """A function that tells whether any condition of `ambient.FAST` holds. Needs torch."""
    scope: dict[str, Any] = dict(ambient.fast_names())
    exec(compile(f"def is_on(): return {ambient.FAST}", "<tsopt: modes around a call>", "exec"), scope)
    found: Callable[[], bool] = scope["is_on"]
    return found


class _Writer:
    """Lines of Python that return None for a call that does not fit.

    Nothing of the signature becomes part of the text but numbers and positions: the rest is bound by name.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"overlap": overlap, "is_repeated": is_repeated, "Question": Question}
        self._containers: list[str] = []
        self._integers: list[tuple[str, int, tuple[int, int]]] = []  # that go along with a size: where, and of what
        self._seen: set[int] = set()
        self._torch = sys.modules.get("torch")
        if self._torch is not None:
            self.names |= ambient.fast_names() | {"forward": self._torch.autograd.forward_ad}

    def function(self, name: str, parameters: str, then: Sequence[str], **names: Any) -> Any:
        """Compiles what was written, then `then`, as a function."""
        body = [f"        {line}" for line in self.lines] or ["        pass"]
        # A nested tensor has no shape, and says so by an error.
        text = [f"def {name}({parameters}):", "    try:", *body, "    except (RuntimeError, KeyError, TypeError):"]
        text += ["        return None", *(f"    {line}" for line in then)]
        scope = self.names | names
        exec(compile("\n".join(text), "<tsopt: guard of a call>", "exec"), scope)
        return scope[name]

    def bound(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _variable(self, place: str) -> str:
        """A variable for a part of the call."""
        name = f"p{len(self.lines)}"
        self.lines.append(f"{name} = {place}")
        return name

    def unless(self, condition: str) -> None:
        self.lines.append(f"if {condition}: return None")

    def call(self) -> bool:
        """Takes `(args, kwargs)` apart; False for a call of a form that is left to the thorough check."""
        args, kwargs = self.signature.outer.children
        self.unless(f"len(args) != {len(args.children)} or len(kwargs) != {len(kwargs.children)}")
        known = all(self.part(f"args[{i}]", child) for i, child in enumerate(args.children))
        keyed = zip(kwargs.keys, kwargs.children, strict=True)
        known = known and all(self.part(f"kwargs[{self.bound(key)}]", child) for key, child in keyed)
        collected = self.signature.collected
        if len(collected) > 1:
            given = "kwargs" if collected == kwargs.keys else f"key for key in kwargs if key in {self.bound(collected)}"
            self.unless(f"tuple({given}) != {self.bound(collected)}")
        if len(self._containers) > 1:  # one object in two places is another form
            ids = ", ".join(f"id({name})" for name in self._containers)
            self.unless(f"len({{{ids}}}) != {len(self._containers)}")
        return known

    def part(self, place: str, node: Structure) -> bool:
        if node.kind == "leaf":
            self._leaf(place, node.index)
            return True
        if node.kind == "const":
            return not node.named and self._const(place, node.value)
        if node.kind == "size":
            self._integers.append((self._variable(place), node.index, node.value))
            return True
        if node.kind == "object" and node.cls is not None and not node.named:
            return self._object(place, node, node.cls)
        if node.kind not in ("tuple", "list", "dict") or node.cls not in (tuple, list, dict):
            return False
        name = self._variable(place)
        self.unless(f"type({name}) is not {self.bound(node.cls)} or len({name}) != {len(node.children)}")
        if node.kind != "tuple":
            self._containers.append(name)
        if node.kind == "dict":
            known = self._keys(name, node.keys)
            keys = [self.bound(key) for key in node.keys]
        else:
            known, keys = True, list(map(str, range(len(node.children))))
        return known and all(self.part(f"{name}[{key}]", child) for key, child in zip(keys, node.children, strict=True))

    def _object(self, place: str, node: Structure, cls: type) -> bool:
        """An object is its items, if it is a mapping, and its attributes, read past whatever its class does."""
        name = self._variable(place)
        self.unless(f"type({name}) is not {self.bound(cls)}")
        self._containers.append(name)
        attributes = None if has_only_dict(cls) else attributes_of
        readers: dict[str, Callable[[Any], Any] | None] = {"item": items_of, "attr": attributes}
        known = True
        for kind, reader in readers.items():
            keys = tuple(key for what, key in node.keys if what == kind)
            if kind == "item" and not issubclass(cls, dict):
                continue
            held = self._variable(f"{name}.__dict__" if reader is None else f"{self.bound(reader)}({name})")
            known = known and self._keys(held, keys)
            children = (child for (what, _), child in zip(node.keys, node.children, strict=True) if what == kind)
            known = known and all(
                self.part(f"{held}[{self.bound(key)}]", child) for key, child in zip(keys, children, strict=True)
            )
        return known

    def _keys(self, place: str, keys: tuple[Any, ...]) -> bool:
        """Of a dict: 1, 1.0 and True are equal. False for keys that are left to the thorough check."""
        self.unless(f"tuple({place}) != {self.bound(keys)}")
        kinds = tuple(map(type, keys))
        if set(kinds) - {str}:
            self.unless(f"tuple(map(type, {place})) != {self.bound(kinds)}")
        return not any(isinstance(key, (tuple, float)) for key in keys)

    def _leaf(self, place: str, index: int) -> None:
        if index in self._seen:  # one tensor in two places
            self.unless(f"{place} is not v{index}")
        else:
            self._seen.add(index)
            self.lines.append(f"v{index} = {place}")

    def _const(self, place: str, value: Any) -> bool:
        if value is None or type(value) is bool:
            self.unless(f"{place} is not {value}")
            return True
        if isinstance(value, (type, Enum)) or (self._torch is not None and isinstance(value, self._torch.dtype)):
            self.unless(f"{place} is not {self.bound(value)}")
            return True
        if self._torch is not None and type(value) is self._torch.device:
            name = self._variable(place)
            self.unless(f"type({name}) is not {self.bound(type(value))} or {name} != {self.bound(value)}")
            return True
        plain = type(value) in (int, str) or (type(value) is float and value != 0 and math.isfinite(value))
        if plain:
            name = self._variable(place)
            self.unless(f"type({name}) is not {self.bound(type(value))} or {name} != {self.bound(value)}")
        return plain

    def checks(self) -> None:
        """What the tensors, and the thread, must be."""
        if self._torch is not None:
            self.unless(ambient.FAST)  # first: a tracer wants to know of every size that is compared
            if any(device.startswith("cuda") for _, device in self.signature.devices):
                self.unless(ambient.FAST_ON_GPU)
        self._sizes: set[str] = set()
        inputs = self.signature.user_inputs
        for position, item in enumerate(inputs):
            self._input(f"v{position}", item)
        self._conditions()
        for position, view in self.signature.viewed if self._torch is not None else ():
            strides = f"v{position}.stride() != {self.bound(view.layout)}"
            self.unless(strides if view.layout else f"not v{position}.is_contiguous()")
        for position in sorted(self.signature.written_inputs):
            self.unless(f"is_repeated(v{position})")
        for name, leaf, (axis, more) in self._integers:
            self.unless(f"type({name}) is not int or {name} != v{leaf}.shape[{axis}] + {more}")
        self._apart(inputs)
        if self._torch is None:
            return
        real = ("float", "bfloat", "complex")
        floats = [f"v{i}" for i, item in enumerate(inputs) if item.type.dtype.startswith(real)]
        if floats:
            # An attribute is read faster than a function is called.
            self.unless(f"({' or '.join(f'{name}.requires_grad' for name in floats)}) and gradients()")
            self.unless("forward._current_level >= 0")
        for mode, on in self.signature.modes:
            if mode in MODES:
                self.unless(f"{self.bound(MODES[mode]())}() is not {on}")
        if self.signature.default_dtype:
            default = self.bound(getattr(self._torch, self.signature.default_dtype))
            self.unless(f"{self.bound(self._torch.get_default_dtype)}() is not {default}")

    def _input(self, name: str, item: Input) -> None:
        kind = self._torch.Tensor if self._torch is not None else importlib.import_module("numpy").ndarray
        self.unless(" or ".join([f"type({name}) is not {self.bound(kind)}", *self.differs(name, item)]))
        for axis, size in enumerate(item.axes):
            if size is not None:
                self._size(f"{name}.shape[{axis}]", size)
        for question in item.asked:
            if question.name == "requires_grad" and not question.answer:
                self.unless(f"{name}.requires_grad" if self._torch is not None else "False")
            else:
                self.unless(f"not {self.bound(question)}.answered_by({name})")

    def differs(self, name: str, item: Input | Output) -> list[str]:
        """Conditions under which a value is not of a type; sizes that have a name are another matter."""
        type_: TensorType = item.type
        if self._torch is None:
            found = [f"{name}.dtype != {self.bound(type_.dtype)}"]
        else:
            found = [f"{name}.dtype is not {self.bound(getattr(self._torch, type_.dtype))}"]
        if item.axes:
            found.append(f"len({name}.shape) != {len(type_.shape)}")
            sizes = zip(type_.shape, item.axes, strict=True)
            found += [f"{name}.shape[{axis}] != {size}" for axis, (size, free) in enumerate(sizes) if free is None]
        else:
            found.append(f"{name}.shape != {self.bound(type_.shape)}")
        if self._torch is not None and isinstance(item, Input):
            found.append(f"{name}.layout is not {self.bound(self._torch.strided)}")
            device = self._torch.device(type_.device)
            found.append(f"not {name}.is_cpu" if device.type == "cpu" else f"{name}.device != {self.bound(device)}")
        return found

    def _size(self, place: str, size: str) -> None:
        """The first axis of a Dim gives its size, all others must have the same."""
        dim, more = dim_of(size)
        if dim == DERIVED:
            return
        name = f"s{[item.name for item in self.signature.dims].index(dim)}"
        if name in self._sizes:
            self.unless(f"{place} != {name} + {more}" if more else f"{place} != {name}")
            return
        self._sizes.add(name)
        self.lines.append(f"{name} = {place} - {more}" if more else f"{name} = {place}")
        found: Dim = next(item for item in self.signature.dims if item.name == dim)
        outside = f"{name} < {found.low}" if found.high is None else f"not {found.low} <= {name} <= {found.high}"
        self.unless(outside + (f" or {name} % {found.step}" if found.step > 1 else ""))

    def _conditions(self) -> None:
        """Checks the conditions on the sizes; results are cached by sizes."""
        dims, unmet = [item.name for item in self.signature.dims], self.signature.unmet
        if self.signature.conditions:
            met = lru_cache(KNOWN_SIZES)(lambda *sizes: unmet(dict(zip(dims, sizes, strict=True))) is None)
            self.unless(f"not {self.bound(met)}({', '.join(f's{i}' for i in range(len(dims)))})")

    def _apart(self, inputs: Sequence[Input]) -> None:
        if not self.signature.aliasing:
            return
        written = self.signature.written_inputs
        for later in range(len(inputs)):
            for position in range(later):
                is_written = position in written or later in written
                pair = f"v{position}", f"v{later}"
                self.unless(f"overlap({', '.join(pair)})" if is_written else " is ".join(pair))


def _inference_mode() -> Callable[[], bool]:
    import torch

    return torch.is_inference_mode_enabled


# Modes of the thread that a model may ask for, and who knows. Gradients are always off in what a program stands for.
MODES: dict[str, Callable[[], Callable[[], bool]]] = {"inference mode": _inference_mode}


def other_mode(signature: Signature) -> str:
    """Why torch is in another mode than for the example; empty where it is not, or the model does not depend on it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ""
    if signature.default_dtype and torch.get_default_dtype() is not getattr(torch, signature.default_dtype):
        now = str(torch.get_default_dtype()).removeprefix("torch.")
        return (
            f"what the model computes depends on the default dtype, which is {now} now "
            f"and was {signature.default_dtype} in the example call"
        )
    differing = (name for name, on in signature.modes if name in MODES and MODES[name]()() is not on)
    return next((f"the model queries {name}, which differs from the example call" for name in differing), "")
