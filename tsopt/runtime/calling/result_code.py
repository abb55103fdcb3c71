"""From the output tensors to what the user's call returns and modifies: straight-line code from the Signature.

Does what `Signature.unbind` does, for calls that match, without walking the structure in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tsopt.compiler.calls.effects import Effect, steps_of
from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.snapshot import attributes_of, has_only_dict, refill_items, set_attribute
from tsopt.compiler.calls.structure import CHANGEABLE, Path, Structure, unflatten

Unbind = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Any]


def unbind_of(signature: Signature) -> Unbind:
    """A function of the output tensors and the call: returns what the model would, and modifies the same objects."""
    try:
        return _Writer(signature).function()
    except _Unknown:  # classes that are known by name only
        return signature.unbind


class _Unknown(Exception):
    pass


class _Writer:
    """Lines of Python. Nothing of the signature becomes part of the text but numbers: the rest is bound by name."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.lines: list[str] = []
        self.names: dict[str, Any] = {"refill_items": refill_items, "set_attribute": set_attribute}
        self._at: dict[Path, str] = {}
        self._objects: list[str] = []
        self._variables = 0

    def function(self) -> Unbind:
        result = self._value(self.signature.result)
        parts = [[self._value(child) for child in effect.parts.children] for effect in self.signature.effects]
        # All of it is read and put together before anything is changed.
        targets = [self._part(effect.path)[0] for effect in self.signature.effects]
        for effect, target, children in zip(self.signature.effects, targets, parts, strict=True):
            self._change(effect, target, children)
        text = ["def unbind(values, args, kwargs):", *(f"    {line}" for line in self.lines), f"    return {result}"]
        exec(compile("\n".join(text), "<tsopt: results of a call>", "exec"), self.names)
        found: Unbind = self.names["unbind"]
        return found

    def bound(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _variable(self, expression: str) -> str:
        self._variables += 1
        name = f"x{self._variables}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _value(self, node: Structure) -> str:
        if node.kind == "leaf":
            return f"values[{node.index}]"
        if node.kind == "const":
            return self.bound(node.value)
        if node.kind == "shared":
            return self._objects[node.index]
        if node.kind == "given":
            return self._part(node.keys)[0]
        if node.kind == "size":
            axis, more = node.value
            return self._variable(f"{self._part(node.keys)[0]}.shape[{axis}] + {more}")
        children = [self._value(child) for child in node.children]
        expression = self._made(node, children)
        if node.kind not in CHANGEABLE:
            return expression
        name = self._variable(expression)
        self._objects.append(name)
        return name

    def _made(self, node: Structure, children: Sequence[str]) -> str:
        inner = "".join(f"{child}, " for child in children)
        if node.kind == "list":
            return f"[{inner}]"
        if node.kind == "tuple" and node.cls in (None, tuple):
            return f"({inner})"
        if node.kind == "dict" and node.cls is dict:
            return f"{{{', '.join(f'{self.bound(k)}: {v}' for k, v in zip(node.keys, children, strict=True))}}}"
        if node.cls is None or node.named:
            raise _Unknown
        # As `unflatten` makes it, around what is here.
        flat = Structure(
            node.kind, node.cls, node.keys, tuple(Structure("leaf", index=i) for i in range(len(children)))
        )
        self.names["unflatten"] = unflatten
        return f"unflatten({self.bound(flat)}, ({inner}))"

    def _part(self, path: Path) -> tuple[str, Structure]:
        """A name for a part of the call, and its structure before the call."""
        node = self.signature.outer
        name = ""
        for depth, step in enumerate(path):
            steps = steps_of(node.kind, node.keys, len(node.children))
            child = node.children[steps.index(step)]
            done = path[: depth + 1]
            if depth == 0:
                self._at[done] = ("args", "kwargs")[step[1]]
            elif done not in self._at:
                self._at[done] = self._variable(self._read(name, node, step))
            name, node = self._at[done], child
        return name, node

    def _read(self, name: str, node: Structure, step: tuple[str, Any]) -> str:
        place, key = step
        if place == "attr":
            return f"{self._attributes(name, node)}[{self.bound(key)}]"
        if node.kind in ("dict", "object"):
            self.names["getitem"] = dict.__getitem__
            return f"getitem({name}, {self.bound(key)})"
        return f"{name}[{self.bound(key)}]"

    def _attributes(self, name: str, node: Structure) -> str:
        if _is_plain(node):
            return f"{name}.__dict__"
        self.names["attributes_of"] = attributes_of
        return f"attributes_of({name})"

    def _change(self, effect: Effect, target: str, children: Sequence[str]) -> None:
        if effect.kind == "list":
            self.lines.append(f"{target}[:] = [{', '.join(children)}]")
            return
        items = {key: child for (place, key), child in self._pairs(effect, children) if place == "item"}
        _, before = self._part(effect.path)
        is_dict = effect.kind == "dict" or (before.cls is not None and issubclass(before.cls, dict))
        if is_dict:
            held = ", ".join(f"{self.bound(key)}: {child}" for key, child in items.items())
            self.lines.append(f"refill_items({target}, {{{held}}})")
        if effect.kind == "dict":
            return
        for place, key in before.keys:
            if place == "attr" and (place, key) not in effect.keys:
                self.names["delete"] = object.__delattr__
                self.lines.append(f"delete({target}, {self.bound(key)})")
        for ((place, key), child), part in zip(self._pairs(effect, children), effect.parts.children, strict=True):
            if place != "attr" or (part.kind == "given" and part.keys == (*effect.path, (place, key))):
                continue  # an attribute that is what it was
            if _is_plain(before):
                self.lines.append(f"{target}.__dict__[{self.bound(key)}] = {child}")
            else:
                self.lines.append(f"set_attribute({target}, {self.bound(key)}, {child})")

    @staticmethod
    def _pairs(effect: Effect, children: Sequence[str]) -> list[tuple[tuple[str, Any], str]]:
        return list(zip(steps_of(effect.kind, effect.keys, len(children)), children, strict=True))


def _is_plain(node: Structure) -> bool:
    """Whether the attributes of an object are all in its `__dict__`."""
    cls = node.cls
    if cls is None or node.named:
        raise _Unknown
    return has_only_dict(cls)
