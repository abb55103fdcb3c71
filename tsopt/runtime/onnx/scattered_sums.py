"""Sums of values at indices that may repeat, which ONNX Runtime must not compute by ScatterND.

Its ScatterND adds in several threads that do not wait for each other, and loses terms. Its ScatterElements does not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph.edit import new_call
from tsopt.compiler.graph.ops import aten, bind
from tsopt.compiler.graph.program import Program

PUTS = frozenset({"index_put", "unsafe_index_put"})
MASKS = (torch.bool, torch.uint8)  # they name no place twice


def loses_terms(node: fx.Node) -> bool:
    """Whether a call adds values at places that several indices give, for which there is only ScatterND."""
    return len(_indices(node)) > 1


def by_elements(program: Program, node: fx.Node) -> None:
    """Makes a `scatter_add`, which becomes ScatterElements, of a call that adds values at indices of one axis."""
    call = bind(node)
    found = {call["dim"]: call["index"]} if base_name(node) == "index_add" else _indices(node)
    x: Any = call["self"]
    shape = list(x.meta["val"].shape)
    if len(found) != 1 or not shape:
        return

    def made(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return new_call(program, node, node, target, args, kwargs)

    ((axis, index),) = found.items()
    axis %= len(shape)
    before, after, given = shape[:axis], shape[axis + 1 :], index.meta["val"]
    if "source" in call:
        source = call["source"] if call["alpha"] == 1 else made(aten.mul.Tensor, call["source"], call["alpha"])
    else:
        source = call["values"]
        if list(source.meta["val"].shape) != [*before, *given.shape, *after]:
            source = made(aten.expand.default, source, [*before, *given.shape, *after])
    if source.meta["val"].dim() != len(shape):
        source = made(aten.reshape.default, source, [*before, given.numel(), *after])
    if given.dtype != torch.int64:
        index = made(aten._to_copy.default, index, dtype=torch.int64)
    index = made(aten.reshape.default, index, [-1 if place == axis else 1 for place in range(len(shape))])
    places = made(aten.expand_as.default, index, source)
    node.target, node.args, node.kwargs = aten.scatter_add.default, (x, axis, places, source), {}


def _indices(node: fx.Node) -> dict[int, fx.Node]:
    """The indices, by axis, at which a call adds values; none for another call, and for masks."""
    call = bind(node) if base_name(node) in PUTS else {}
    if not call.get("accumulate"):
        return {}
    found = {axis: index for axis, index in enumerate(call["indices"]) if isinstance(index, fx.Node)}
    return {} if any(index.meta["val"].dtype in MASKS for index in found.values()) else found
