"""Numbers that PyTorch rounds to bfloat16 or float16 before it computes with them, where the exporter does not.

`x > 0.1` of bfloat16 compares with 0.10009765625. The exporter compares in float32, with 0.1.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Program

NARROW = (torch.bfloat16, torch.float16)
COMPARISONS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal"}
    | {"isin", "hardshrink"}
)


def with_rounded_numbers(program: Program, also: Collection[str] = ()) -> Program:
    """A copy in which operands of comparisons have the dtype that PyTorch compares in, if that is a narrow one.

    Args:
        also: further ops whose literals are rounded.
    """
    made = program.copy()
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, lambda block: with_rounded_numbers(block, also))
        elif base_name(node) in COMPARISONS or base_name(node) in also:
            _round(made, node)
    return made


def _round(program: Program, node: fx.Node) -> None:
    first, second, *_ = bind(node).values()
    operands = [value.meta["val"] if isinstance(value, fx.Node) else value for value in (first, second)]
    dtype = torch.result_type(*operands)
    if dtype not in NARROW or not any(_is_of(value, dtype) for value in operands):
        return

    def rounded(value: Any) -> Any:
        if type(value) in (int, float):
            near = torch.tensor(value, device="cpu").to(dtype).item()
            return value if near == value else near
        of_a_tensor = isinstance(value, fx.Node) and isinstance(value.meta["val"], torch.Tensor)
        if of_a_tensor and base_name(node) in COMPARISONS and value.meta["val"].dtype != dtype:
            return new_call(program, node, node, aten._to_copy.default, (value,), {"dtype": dtype})
        return value

    node.args = tuple(map(rounded, node.args))
    node.kwargs = {key: rounded(value) for key, value in node.kwargs.items()}


def _is_of(value: object, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype
