"""A program as TorchScript source, for programs that compute with sizes, which a trace would specialize."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program, attribute_name
from tsopt.errors import BackendError

INFIX = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%", "truediv": "/", "pow": "**"}
CALLS = {"sym_max": "max", "sym_min": "min", "sym_float": "float", "sym_int": "int", "neg": "-"}


def source_of(program: Program) -> str:
    """`def forward(self, ...)`: flat tensors in, a list of flat tensors out; weights are attributes.

    Raises:
        BackendError: an argument of a kind that TorchScript cannot write.
    """
    names: dict[fx.Node, str] = {}
    inputs: list[str] = []
    lines: list[str] = []
    for node in program.graph.nodes:
        if node.op == "output":
            lines.append(f"return [{', '.join(names[value] for value in program.outputs)}]")
        elif node.op == "get_attr":
            names[node] = f"self.{attribute_name(str(node.target))}"
        else:
            names[node] = f"v{len(names)}"
            if node.op == "placeholder":
                inputs.append(names[node])
            else:
                lines.append(f"{names[node]} = {_call(node, names)}")
    head = f"def forward(self, {', '.join(inputs)}):"
    return "\n    ".join([head, *lines]) + "\n"


def _call(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    args = [_value(arg, names) for arg in node.args]
    if node.target is operator.getitem:
        return f"{args[0]}[{args[1]}]"
    number = ops.number_name(node.target)
    if number in INFIX:
        return f"{args[0]} {INFIX[number]} {args[1]}"
    if number in CALLS:
        return f"{CALLS[number]}({', '.join(args)})"
    if node.target is ops.SIZE:
        return f"{args[0]}.size({args[1]})"
    target: Any = node.target
    kinds = {argument.name: str(argument.type) for argument in target._schema.arguments}
    order = list(kinds.values())
    written = [_typed(arg, kind, names) for arg, kind in zip(node.args, order, strict=False)]
    written += [f"{key}={_typed(value, kinds[key], names)}" for key, value in node.kwargs.items()]
    namespace, _, name = target._schema.name.partition("::")
    return f"torch.ops.{namespace}.{name}({', '.join(written)})"


def _typed(value: Any, kind: str, names: Mapping[fx.Node, str]) -> str:
    """A value for an argument; lists that do not show their type are told it."""
    text = _value(value, names)
    if isinstance(value, (list, tuple)) and (not value or any(item is None for item in value)):
        tensor = "torch.Tensor | None" if "Optional[Tensor]" in kind else "torch.Tensor"
        return f"torch.jit.annotate(list[{tensor if 'Tensor' in kind else 'int'}], {text})"
    return text


def _value(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item, names) for item in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    raise BackendError(f"TorchScript has no literal for a {type(value).__name__}")
