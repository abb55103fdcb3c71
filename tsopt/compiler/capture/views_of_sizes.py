"""Which parts of an input or of another result the results of a program for many sizes are.

A recorded call says so for its own sizes. Two of them show where along each axis a part begins: always at the same
place, or always as far from the end. Results that are other parts, such as the second half, are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tsopt.compiler.calls.example import Example
from tsopt.compiler.calls.result_views import INPUT, JOINT, OUTPUT, View, contiguous
from tsopt.compiler.calls.signature import Dim, dim_of
from tsopt.compiler.capture.recorded_questions import Asked, asked_by
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.dims import resized
from tsopt.compiler.sizes.specialize import evaluate, type_at

Shapes = dict[tuple[str, int], tuple[int, ...]]  # by kind and position of a tensor


def views_of_all_sizes(
    model: Callable[..., Any], program: Program, example: Example, asked: Asked
) -> tuple[View | None, ...]:
    """What a call of the model on the example has shown, for all sizes of its program."""
    if not program.signature.dims or not any(map(_is_part, asked.views)):
        return asked.views
    whole = tuple(None if _is_part(view) else view for view in asked.views)
    leaves, _ = program.signature.flattened(example.args, example.kwargs)
    sizes = {name: next(iter(found)) for name, found in program.signature.sizes_of(leaves).items()}
    others = {dim.name: another for dim in program.signature.dims if (another := _another(dim, sizes[dim.name]))}
    if len(others) < len(sizes):
        return whole
    further = asked_by(model, _at(program, example, others)).views
    try:
        shapes, other_shapes = _shapes(program, sizes), _shapes(program, others)
    except Exception:  # whatever an op says about sizes that do not fit
        return whole
    if len(further) != len(asked.views):
        return whole
    for shapes_of_one in (shapes, other_shapes):
        shapes_of_one |= {(INPUT, len(leaves) + i): tuple(held.shape) for i, held in enumerate(asked.buffers)}
    return tuple(
        view if view is None or not _is_part(view) else _of_both(view, other, shapes, other_shapes)
        for view, other in zip(asked.views, further, strict=True)
    )


def _is_part(view: View | None) -> bool:
    return view is not None and view.shape is not None


def _another(dim: Dim, size: int) -> int | None:
    """Another size, far from the first, so that no fraction of the two begins at the same place."""
    near = (2 * size + dim.step, size // 2 // dim.step * dim.step, size + dim.step, size - dim.step)
    return next((other for other in near if other != size and other > 1 and dim.admits(other)), None)


def _at(program: Program, example: Example, sizes: Mapping[str, int]) -> Example:
    places = {
        (position, axis): sizes[dim] + more
        for position, item in enumerate(program.signature.user_inputs)
        for axis, name in enumerate(item.axes)
        if name is not None
        for dim, more in [dim_of(name)]
    }
    return resized(example, places, program.signature.outer)


def _shapes(program: Program, sizes: Mapping[str, int]) -> Shapes:
    """Those of the user's inputs and of the results."""
    signature = program.signature
    found = {(INPUT, i): type_at(item, sizes).shape for i, item in enumerate(signature.user_inputs)}
    values = evaluate(program, sizes)
    results = program.outputs[len(signature.writes) :]
    return found | {(OUTPUT, i): tuple(values[node].shape) for i, node in enumerate(results)}


def _of_both(view: View, other: View | None, shapes: Shapes, other_shapes: Shapes) -> View | None:
    """The view that is the one at some sizes and the other at others; None if there is no such."""
    at = view.kind, view.of
    if other is None or (other.kind, other.of, other.layout) != (*at, view.layout):
        return None
    if view.kind == JOINT or view.layout != () or at not in shapes or len(view.shape or ()) != len(other.shape or ()):
        return None
    base, further = shapes[at], other_shapes[at]
    axes = _axes(view.stride or (), other.stride or (), contiguous(base), contiguous(further))
    starts = _starts((view.offset or 0, base), (other.offset or 0, further))
    if axes is None or starts is None:
        return None
    return replace(view, shape=None, stride=None, offset=None, axes=axes, starts=starts)


def _axes(
    stride: Sequence[int], other: Sequence[int], steps: Sequence[int], other_steps: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """For each axis of the view the axis that it runs along, and how many of its steps it takes."""
    found = []
    for mine, theirs in zip(stride, other, strict=True):
        along = (
            (axis, mine // step)
            for axis, (step, other_step) in enumerate(zip(steps, other_steps, strict=True))
            if mine % step == 0 and theirs == mine // step * other_step
        )
        axis = next(along, None)
        if axis is None:
            return None
        found.append(axis)
    return tuple(found)


def _starts(first: tuple[int, Sequence[int]], second: tuple[int, Sequence[int]]) -> tuple[int, ...] | None:
    """Where along each axis a view begins, by its offset and the shape of its tensor; negative: from the end."""
    places = []
    for offset, shape in (first, second):
        places.append([offset // step % max(size, 1) for step, size in zip(contiguous(shape), shape, strict=True)])
    found = []
    for mine, theirs, size, other_size in zip(*places, first[1], second[1], strict=True):
        if mine != theirs and mine - size != theirs - other_size:
            return None
        found.append(mine if mine == theirs else mine - size)
    return tuple(found)
