"""Maxima of values that are all -inf, and minima of inf: engines start from the largest finite number instead.

OpenVINO does in reductions and in pooling, ONNX Runtime in some kernels of pooling.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from typing import Any

from torch import fx

from tsopt.compiler.analysis.infinities import may_be_infinite
from tsopt.compiler.graph.control import Control, with_blocks
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program

ONLY = -1  # the position of a result that is not one of several
# By op: its results that are extremes, by position, and where each of them begins.
POOLING: Mapping[Any, Mapping[int, float]] = {
    aten.max_pool1d.default: {ONLY: -math.inf},
    aten.max_pool2d.default: {ONLY: -math.inf},
    aten.max_pool3d.default: {ONLY: -math.inf},
    aten.max_pool1d_with_indices.default: {0: -math.inf},
    aten.max_pool2d_with_indices.default: {0: -math.inf},
    aten.max_pool3d_with_indices.default: {0: -math.inf},
    aten.adaptive_max_pool1d.default: {0: -math.inf},
    aten.adaptive_max_pool2d.default: {0: -math.inf},
    aten.adaptive_max_pool3d.default: {0: -math.inf},
}
REDUCTIONS: Mapping[Any, Mapping[int, float]] = {
    aten.amax.default: {ONLY: -math.inf},
    aten.amin.default: {ONLY: math.inf},
    aten.max.default: {ONLY: -math.inf},
    aten.min.default: {ONLY: math.inf},
    aten.max.dim: {0: -math.inf},
    aten.min.dim: {0: math.inf},
    aten.aminmax.default: {0: math.inf, 1: -math.inf},
}


def with_infinities(program: Program, known: Mapping[Any, Mapping[int, float]]) -> Program:
    """A copy in which these ops return an infinity if all their values are that infinity.

    The same op, applied to ones and zeros, tells where that is.
    """
    made = program.copy()
    for node in list(made.graph.nodes):
        if isinstance(node.target, Control):
            node.target = with_blocks(node.target, lambda block: with_infinities(block, known))
        elif node.target in known and _is_affected(made, node):
            _mend(made, node, known[node.target])
    return made


def _is_affected(program: Program, node: fx.Node) -> bool:
    x: Any = node.args[0]
    return bool(x.meta["val"].is_floating_point()) and may_be_infinite(program, x)


def _mend(program: Program, node: fx.Node, ends: Mapping[int, float]) -> None:
    x, *others = node.args
    for position, end in ends.items():
        results = [node] if position == ONLY else _items(node, position)
        for result in results:
            _mend_one(program, node, result, (x, *others), position, end)


def _items(node: fx.Node, position: int) -> Collection[fx.Node]:
    return [user for user in node.users if user.target is operator.getitem and user.args[1] == position]


def _mend_one(
    program: Program, node: fx.Node, result: fx.Node, args: tuple[Any, ...], position: int, end: float
) -> None:
    before, users = result.next, list(result.users)

    def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_call(program, before, node, target, args, kwargs)

    x, *others = args
    # 1 where another number is: its maximum is 0 without any. For a minimum, 1 where it is this end.
    question = aten.ne.Scalar if end < 0 else aten.eq.Scalar
    marks = made(aten.to.dtype, made(question, x, end), x.meta["val"].dtype)
    target: Any = node.target
    answer = made(target, marks, *others, **node.kwargs)
    if position != ONLY:
        answer = made(operator.getitem, answer, position)
    # A window that lies entirely in the padding holds the lowest number of the dtype.
    is_end = made(aten.le.Scalar if end < 0 else aten.gt.Scalar, answer, 0)
    mended = made(aten.where.ScalarSelf, is_end, end, result)
    for user in users:
        user.replace_input_with(result, mended)
