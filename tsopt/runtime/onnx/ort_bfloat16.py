"""bfloat16 for ONNX Runtime on a CPU, where it has hardly any kernels for it: computed in float32, then rounded.

PyTorch's own CPU kernels do the same, op by op.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import Impossible, new_call
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.runtime.onnx.narrow_numbers import with_rounded_numbers

CASTS = (aten.to.dtype, aten._to_copy.default, operator.getitem)
# Besides comparisons, those whose literals PyTorch rounds: others, such as `mul`, compute with all their digits.
ROUNDING = frozenset({"add", "sub", "rsub", "pow", "fmod", "remainder"})


def widened(program: Program) -> Program:
    """A copy in which calls on bfloat16 are calls on float32, with their results rounded."""
    made = with_rounded_numbers(program, ROUNDING)
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, widened)
        elif ops.is_call(node) and node.target not in CASTS and any(map(_is_narrow, node.all_input_nodes)):
            _widen(made, node)
    return made


def _is_narrow(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16


def _widen(program: Program, node: fx.Node) -> None:
    wide: dict[fx.Node, fx.Node] = {}
    for source in filter(_is_narrow, node.all_input_nodes):
        wide[source] = new_call(program, node, node, aten.to.dtype, (source, torch.float32), {})
    given: Any = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: wide.get(source, source))
    args, kwargs = given
    target: Any = node.target
    try:
        made = new_call(program, node, node, target, args, kwargs)
    except Impossible:  # an op that wants bfloat16
        return
    if isinstance(node.meta["val"], torch.Tensor):
        _replace(program, node, made)
        return
    for part in list(node.users):
        _replace(program, part, new_call(program, part, part, operator.getitem, (made, part.args[1]), {}))
    program.graph.erase_node(node)


def _replace(program: Program, node: fx.Node, wide: fx.Node) -> None:
    """Puts a result in place of another, rounded where that one is."""
    if _is_narrow(node) and not _is_narrow(wide):
        wide = new_call(program, node, node, aten.to.dtype, (wide, torch.bfloat16), {})
    node.replace_all_uses_with(wide)
    program.graph.erase_node(node)
