"""One call of a program whose arguments are ranges, as the rules of interval arithmetic see it."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.intervals import ANY, Range, of_dtype, rounded, wrapped, wraps
from tsopt.compiler.graph import ops

CASTS = frozenset({"to", "to_copy", "type_as", "copy"})  # their ranges are those before they wrap around
Ranges = dict[fx.Node, Range]
Values = Mapping[fx.Node, Any]  # fake tensors and sizes by node


class RangedCall:
    """One call, whose arguments are ranges.

    Args:
        doubtful: floats that may be NaN: a cast may turn them into any whole number.
    """

    def __init__(self, node: fx.Node, values: Values, found: Ranges, doubtful: Collection[fx.Node] = ()) -> None:
        self.node, self.values, self.found, self.doubtful = node, values, found, doubtful
        self.value: Any = values[node]  # several for an op with several results
        self.name = base_name(node)
        self.arguments = ops.bind(node)

    def of(self, argument: Any) -> Range:
        """The range of an argument, as it is in its dtype, and in that of a float result."""
        argument = self.arguments[argument] if isinstance(argument, str) else argument
        if isinstance(argument, (list, tuple)):
            return self.union(argument)
        if isinstance(argument, fx.Node):
            value = self.values[argument]
            if isinstance(value, torch.Tensor):
                if argument in self.doubtful and not self.is_float:
                    return ANY
                found = wrapped(self.found[argument], value.dtype)
                if not value.dim() and self.name not in CASTS and self.is_whole:  # promotes as a literal does
                    found = wrapped(found, self.value.dtype)
                return found if value.dtype == getattr(self.value, "dtype", None) else self.rounded(found)
            argument = value
        number = argument if isinstance(argument, float) else int(argument)
        if self.is_whole and wraps(number, self.value.dtype):
            return of_dtype(self.value.dtype)
        return self.rounded(Range(number, number))

    @property
    def is_whole(self) -> bool:
        """Whether the result is one tensor of whole numbers."""
        value = self.value
        return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())

    @property
    def is_float(self) -> bool:
        """Whether the result, or one of several, is of floats."""
        return any(value.is_floating_point() for value in ops.tensors_of(self.value))

    def reads_float(self, name: str) -> bool:
        value = self.values.get(self.arguments[name])
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    def rounded(self, found: Range, steps: int = 0) -> Range:
        """A range in the dtype of a float result; a kernel may be off by some steps more."""
        is_one = isinstance(self.value, torch.Tensor) and self.value.is_floating_point()
        return rounded(found, self.value.dtype, steps) if is_one else found

    def union(self, arguments: Sequence[Any]) -> Range:
        found = [self.of(argument) for argument in arguments]
        return Range(min(r.low for r in found), max(r.high for r in found))

    def number(self, name: str, default: float | None = None) -> float:
        found = self.arguments.get(name, default)
        found = self.values[found] if isinstance(found, fx.Node) else default if found is None else found
        if not isinstance(found, (int, float)):
            raise TypeError(name)
        return found

    def size(self, name: str = "self", dims: Any = None) -> int:
        """How many elements an argument has along some of its axes, or in all."""
        shape = self.values[self.arguments[name]].shape
        if dims is None or dims == []:
            return math.prod(shape)
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return math.prod(shape[int(dim)] for dim in dims) if shape else 1


def base_name(node: fx.Node) -> str:
    """`add` for `aten.add.Tensor`, `getitem`; empty for calls that are neither ATen nor quantization ops.

    `view.dtype`, which reads bits and keeps no value, is `view_dtype`.
    """
    if node.target is operator.getitem:
        return "getitem"
    if node.target is torch.ops.aten.view.dtype:
        return "view_dtype"
    name = node.target._schema.name if ops.is_overload(node.target) else ""  # type: ignore[union-attr]
    namespace, _, base = name.partition("::")
    return base.strip("_") if namespace == "aten" or ops.is_quantization(node.target) else ""
