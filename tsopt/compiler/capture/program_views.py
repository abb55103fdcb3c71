"""Which results of a program are views, for all of its sizes: those that are views of the model's in recorded calls.

Some are views at single sizes only: of one row, `x.transpose(0, 1).reshape(...)` is one, and a copy of more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.calls.conditions import Places
from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.result_views import INPUT, JOINT, WEIGHT, View
from tsopt.compiler.calls.signature import dim_of
from tsopt.compiler.capture.recorded_questions import Asked, asked_by
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.dims import Dynamic, resized
from tsopt.compiler.sizes.specialize import sizes_in, traced_sizes
from tsopt.compiler.sizes.symbols import PLACES

COPIES = (  # which move what their argument holds, where it cannot be a view
    *(aten.clone.default, aten.contiguous.default, aten.reshape.default, aten._unsafe_view.default),
    *(aten.flatten.using_ints, aten.reshape_as.default),
)


def with_views(
    program: Program,
    model: Callable[..., Any],
    asked: Asked,
    example: Example,
    traced: Asked,
    wanted: Dynamic | None,
) -> Program:
    """The same, whose results are views where those of the model are, as it was asked with the example.

    Args:
        traced: as it was asked with the sizes of the trace.
        wanted: what was captured for more than one size.
    """
    signature = program.signature
    known = program.graph.output_node().meta.pop(PLACES, ())
    if len(asked.views) != len(signature.returned):
        return program
    returned = [at for item, at in zip(signature.outputs, known, strict=True) if not item.writes] if known else []
    sizes = sizes_in(signature, example) if returned else {}
    views: list[View | None] = []
    returned_weights: list[torch.Tensor] = []
    for number, view in enumerate(asked.views):
        made = view
        if view is not None and view.shape is not None and signature.dims:
            at = returned[number] if returned else None
            made = _for_many_sizes(view, at, sizes, signature.returned[number].type.shape, traced_sizes(signature))
            there = traced.views[number] if len(traced.views) == len(asked.views) else None
            made = made if made is not None and replace(made, places=None) == there else None
        views.append(None if made is None else _of_program(made, asked, program, returned_weights))
    one = None if wanted is None else _at_one(program, model, asked, example, wanted)
    if one is not None and len(one[0].views) == len(traced.views) == len(views):
        for number, (there, view) in enumerate(zip(traced.views, one[0].views, strict=True)):
            made = None if view is None or there is not None else _of_program(view, one[0], program, returned_weights)
            if made is not None and made.kind != JOINT:
                views[number] = replace(made, where=tuple(one[1].items()))
    found = iter(views)
    outputs = [item if item.writes else replace(item, view=next(found)) for item in signature.outputs]
    signature = replace(signature, outputs=tuple(outputs))
    return replace(program, signature=signature, returned_weights=tuple(returned_weights))


def _of_program(view: View, asked: Asked, program: Program, weights: list[torch.Tensor]) -> View:
    """A view by the positions of a program, or of returned weights, to which it adds what is not among them."""
    users = len(program.signature.user_inputs)
    if view.kind != INPUT or view.of < users:
        return view
    tensor = asked.held[view.of - users]
    written = {id(program.state[item.name]): users + i for i, item in enumerate(program.signature.state_inputs)}
    if id(tensor) in written:
        return replace(view, of=written[id(tensor)])
    known = next((i for i, other in enumerate(weights) if other is tensor), len(weights))
    weights += [tensor] if known == len(weights) else []
    return replace(view, kind=WEIGHT, of=known)


def _for_many_sizes(
    view: View, places: Places | None, seen: Mapping[str, int], shape: tuple[int, ...], traced: Mapping[str, int]
) -> View | None:
    """A part for all sizes; None where its places are not known for them.

    Args:
        seen: the sizes at which the view was seen.
        shape, traced: of the result, and the sizes, in the trace.
    """
    if places is None or view.kind == JOINT or view.shape is None or view.layout != ():
        return None
    found = replace(view, places=places)
    try:
        there = found.at(traced, shape)
        return replace(there, places=places) if there is not None and found.at(seen, view.shape) == view else None
    except ValueError:
        return None


def _at_one(
    program: Program, model: Callable[..., Any], asked: Asked, example: Example, wanted: Dynamic
) -> tuple[Asked, dict[str, int]] | None:
    """What a call asks whose only dynamic size is one, if a result that is a copy of more may be a view there."""
    signature = program.signature
    if len(signature.dims) != 1 or not signature.dims[0].admits(1):
        return None
    sizes = {signature.dims[0].name: 1}
    outputs = [value for value, item in zip(program.outputs, signature.outputs, strict=True) if not item.writes]
    if signature.unmet(sizes) or not any(_is_copied(value, outputs) for value in outputs):
        return None
    if sizes == sizes_in(signature, example):
        return asked, sizes
    places = {
        (position, axis): 1 + dim_of(signature.user_inputs[position].axes[axis] or "")[1]
        for position, axes in wanted.axes.items()
        for axis in axes
    }
    return asked_by(model, resized(example, places, wanted.structure)), sizes


def _is_copied(result: fx.Node, results: list[fx.Node]) -> bool:
    """Whether a result has the elements of an input or of another result, moved."""
    node = result
    while sources := (node.all_input_nodes[:1] if node.target in COPIES else ops.may_alias(node)):
        node = sources[0]
        if node.op == "placeholder" or (node is not result and node in results):
            return True
    return False
