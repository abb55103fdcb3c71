"""Program: a typed functional graph of ATen calls, its weights and its signature; text form and fingerprint.

Never imports a pass or a backend.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tsopt.compiler.calls.signature import Signature
from tsopt.compiler.calls.types import TensorType
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.origin import comment_on, origins_of, rule_of
from tsopt.compiler.tensor_bytes import bytes_in


class Numerics(enum.IntEnum):
    """How a rewrite may change values; the weakest class applied sets the tolerance of the final check."""

    EXACT = 0  # bit-identical for every input, including inf, the sign of zero and the positions of NaN
    ROUNDING = 1  # the same real function, rounded differently
    LOSSY = 2  # an approximation; only on request


@dataclass
class Program:
    """A model as a graph.

    Attributes:
        graph: placeholder, get_attr, call_function and output nodes. `meta["val"]` is a fake tensor,
            `meta["module"]` the user's module path, `meta["source"]` a `file:line` in the user's code. A node that a
            rule created has the rule's name in `meta["rule"]`, and the origins of everything that it replaced in
            `meta["origins"]`.
        weights: the tensor of each get_attr target, shared with the user's model. State that the model
            writes is not included: it is an input and an output of the graph (see `Signature`).
        signature: inputs, outputs and their nesting.
        state: the live tensors behind the signature's state inputs, by name.
        numerics: the weakest class of rewrite applied so far.
        name: the class name of the model, for titles.
        frontend: how the model was captured, and why, if not by torch.export.
        weights_file: the safetensors file that the weights are mapped from, if nothing writes to it; engines may map
            it as well.
        returned_weights: tensors of the user's model that a result is, or is a view of; files do not have them.
    """

    graph: fx.Graph
    weights: dict[str, torch.Tensor]
    signature: Signature
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    numerics: Numerics = Numerics.EXACT
    name: str = "program"
    frontend: str = ""
    weights_file: Path | None = None
    returned_weights: tuple[torch.Tensor, ...] = ()

    def copy(self) -> Program:
        """A copy to edit: a separate graph with the same weights."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
        return replace(self, graph=graph, weights=dict(self.weights))

    def module(self) -> fx.GraphModule:
        """The graph as a GraphModule that shares the weights; it takes flat tensors and returns a tuple of tensors."""
        root = {name: self.weights[name] for name in self.used_weights()}
        return fx.GraphModule(_plain_names(root), _renamed(self.graph), class_name=self.name)

    def used_weights(self) -> list[str]:
        return list(dict.fromkeys(str(n.target) for n in self.graph.nodes if n.op == "get_attr"))

    def calls(self) -> Iterator[fx.Node]:
        return (node for node in self.graph.nodes if ops.is_call(node))

    @property
    def node_count(self) -> int:
        """The number of op calls, without the getitem calls of multi-output ops."""
        count = 0
        for node in self.calls():
            blocks = ops.blocks_of(node)
            count += ops.is_overload(node.target) or bool(blocks)
            count += sum(block.node_count for block in blocks)
        return count

    @property
    def outputs(self) -> list[fx.Node]:
        """The returned values: writes first, then the results of the model."""
        return list(cast("tuple[fx.Node, ...]", self.output_node.args[0]))

    @property
    def output_node(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def fake_mode(self) -> FakeTensorMode:
        for node in self.graph.nodes:
            for value in ops.tensors_of(node.meta.get("val")):
                mode: FakeTensorMode = value.fake_mode
                return mode
        return FakeTensorMode()

    @property
    def text(self) -> str:
        """The program as text: for printing, golden files and the fingerprint."""
        return self.text_with(self.value_names())

    def text_with(self, names: dict[fx.Node, str]) -> str:
        """The program as text, its values under these names."""
        sizes = [*map(str, self.signature.dims), *(f"only where {item}" for item in self.signature.decisive)]
        dims = f"  # {'; '.join(sizes)}" if sizes else ""
        return "\n".join([f"program {self.name}{dims}", *self.lines(names)])

    def lines(self, names: dict[fx.Node, str] | None = None, *, origins: bool = True) -> Iterator[str]:
        """One line for each node; `origins` appends module paths, source lines and the rule that made it."""
        names = names or self.value_names()
        inputs = iter(self.signature.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                item = next(inputs, None)
                kind = "state" if item is not None and item.state else "input"
                yield f"  {names[node]}: {format_type(type_of(node))} = {kind}"
                continue
            line = f"  {self._return_line(names) if node.op == 'output' else _line(node, names)}"
            origin = comment_on(node) if origins and node.op != "output" else ""
            line = f"{line}{' ' * max(2, 64 - len(line))}# {origin}" if origin else line
            yield "\n".join([line, *_lines_within(node, origins=origins)])

    def records(self, names: dict[fx.Node, str] | None = None) -> Iterator[dict[str, Any]]:
        """A record for each call and weight: its name in the text, op, type, and where it comes from."""
        names = names or self.value_names()
        for node in self.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                yield {
                    "name": names[node],
                    "op": ops.name_of(node) if node.op == "call_function" else "weight",
                    "type": "int" if ops.is_number(node) else format_type(type_of(node)),
                    "origins": list(origins_of(node)),
                    "rule": rule_of(node),
                }

    def _return_line(self, names: dict[fx.Node, str]) -> str:
        """`return %2`, with what the call writes as `%n <- %0`."""
        if not isinstance(self.output_node.args[0], tuple) or len(self.outputs) != len(self.signature.outputs):
            return f"return {format_value(self.output_node.args[0], names)}"  # a broken program is shown as it is
        parts = [
            f"%{item.writes} <- {format_value(value, names)}" if item.writes else format_value(value, names)
            for value, item in zip(self.outputs, self.signature.outputs, strict=True)
        ]
        return f"return {', '.join(parts)}"

    def value_names(self) -> dict[fx.Node, str]:
        """Names that do not depend on the order of rewrites: inputs and weights keep theirs, calls are numbered."""
        names: dict[fx.Node, str] = {}
        count = 0
        taken = {item.name for item in self.signature.inputs}
        inputs = iter(self.signature.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                item = next(inputs, None)
                names[node] = f"%{item.name if item else node.name}"
            elif node.op == "get_attr":
                short = str(node.target)
                names[node] = f"%{short}" if short not in taken else f"%weight:{short}"
            elif node.op != "output":
                names[node] = f"%{count}"
                count += 1
        return names

    def fingerprint(self, *, contents: bool = False) -> str:
        """sha256 of the text without origins; with `contents`, also of the bytes of the weights and the state."""
        digest = hashlib.sha256("\n".join(self.lines(origins=False)).encode())
        digest.update(repr(self.signature.inputs).encode() + repr(self.signature.outputs).encode())
        conditions = list(map(str, self.signature.conditions))
        digest.update(repr(self.signature.dims).encode() + (repr(conditions).encode() if conditions else b""))
        views = [item.view for item in self.signature.outputs]
        digest.update(repr(views).encode() if any(views) else b"")
        if contents:
            values = [(name, self.weights[name]) for name in sorted(self.used_weights())]
            for name, value in [*values, *sorted(self.state.items())]:
                plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(name.encode() + bytes_in(plain).numpy().tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        return self.text


def _plain_names(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {attribute_name(name): value for name, value in weights.items()}


def attribute_name(weight: str) -> str:
    """A weight's path as one identifier, from which it could be read: `a.b` is `w_a__b`, `a_b` is `w_a_5f_b`.

    Module trees would let `a.b` and a tensor called `a` collide.
    """
    return "w_" + "".join(c if c.isalnum() and c.isascii() else "__" if c == "." else f"_{ord(c):x}_" for c in weight)


def _renamed(graph: fx.Graph) -> fx.Graph:
    out = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        mapping[node] = out.node_copy(node, mapping.__getitem__)
        if node.op == "get_attr":
            mapping[node].target = attribute_name(str(node.target))
    return out


Type = TensorType | tuple[TensorType, ...] | None


def type_of_value(value: object) -> Type:
    """The type of a real or fake value; a tuple for multi-output ops, None for what is no tensor."""
    if isinstance(value, torch.Tensor):
        return TensorType.of(value)
    return tuple(map(TensorType.of, ops.tensors_of(value))) if isinstance(value, (list, tuple)) else None


def type_of(node: fx.Node) -> Type:
    """The recorded type of a value."""
    value = node.meta.get("val")
    cached = node.meta.get("type")
    if cached is not None and cached[0] is value:
        return cached[1]  # type: ignore[no-any-return]
    found = type_of_value(value)
    node.meta["type"] = (value, found)
    return found


def tensor_type(node: fx.Node) -> TensorType:
    """The recorded type of a value that is one tensor."""
    found = type_of(node)
    if not isinstance(found, TensorType):
        raise TypeError(f"{node.name} is not a single tensor")
    return found


def _lines_within(node: fx.Node, *, origins: bool) -> Iterator[str]:
    for title, block in zip(getattr(node.target, "titles", ()), ops.blocks_of(node), strict=True):
        yield f"    {title}:"
        for line in block.lines(origins=origins):
            yield from (f"    {part}" for part in line.splitlines())


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    left = f"{names[node]}: {'int' if ops.is_number(node) else format_type(type_of(node))} ="
    if node.op == "get_attr":
        return f"{left} weight"
    arguments = [format_value(arg, names) for arg in node.args]
    arguments += [f"{key}={format_value(value, names)}" for key, value in node.kwargs.items()]
    return f"{left} {ops.name_of(node)}({', '.join(arguments)})"


def format_type(found: Type) -> str:
    if isinstance(found, tuple):
        return f"({', '.join(map(str, found))})"
    return "none" if found is None else _type_text(found)


@functools.lru_cache(maxsize=1 << 12)  # a program has few types, and is printed after every pass
def _type_text(found: TensorType) -> str:
    return str(found) if found.contiguous else f"{found}/{','.join(map(str, found.stride))}"


def format_value(value: object, names: Mapping[fx.Node, str]) -> str:
    """An argument as text; equal text means equal arguments (`1`, `1.0` and `True` differ, so do `0.0`, `-0.0`)."""
    if isinstance(value, fx.Node):
        return names.get(value, f"%{value.name}")
    if isinstance(value, (list, tuple)):
        inner = ", ".join(format_value(item, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, slice):
        return f"slice({', '.join(format_value(v, names) for v in (value.start, value.stop, value.step))})"
    return repr(value)
