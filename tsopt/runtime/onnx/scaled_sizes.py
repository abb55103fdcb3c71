"""Linear and cubic upsampling by a scale, of which ONNX makes another size or another grid than PyTorch.

Resize multiplies a size by the scale in float32, PyTorch in float64: 100 * 1.15 is 115 in one and 114 in the other.
Engines also skip an axis of 3, of which 1.25 makes 3 again; most kernels of PyTorch read it between its elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import fx

from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.ops import bind
from tsopt.compiler.graph.program import Program
from tsopt.compiler.sizes.samples import sample_sizes
from tsopt.compiler.sizes.survey import Survey

SPATIAL = 2  # the first spatial axis
FEW_BITS = 8  # of a scale: its product with a size of 16 bits needs no more than the 24 of float32
WRITTEN_OUT = "upsample_linear1d"  # the exporter has only a formula for it, which contains sizes that are fixed
ANTIALIASED = frozenset({"upsample_bilinear2d_aa", "upsample_bicubic2d_aa"})
KINDS = ANTIALIASED | {WRITTEN_OUT, "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"}


def mistaken_scales(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """The calls that differ at their size, or may differ at some of their dynamic sizes, and why."""
    calls = [node for node in all_calls(program) if _scales(node)]
    if not calls:
        return
    shapes = _shapes(program, [node.args[0] for node in calls])
    for node, found in zip(calls, shapes, strict=True):
        axes = zip(*(shape[SPATIAL:] for shape in found), strict=True)
        pairs = [(set(sizes), scale) for sizes, scale in zip(axes, _scales(node), strict=True)]
        name = ops.name_of(node)
        if base_name(node) in ANTIALIASED:
            if any(_is_uneven(*pair) for pair in pairs):
                yield node, f"the ONNX exporter leaves out the scale of {name}, which rounded sizes do not tell"
        elif any(_is_rounded(*pair) for pair in pairs if base_name(node) != WRITTEN_OUT or len(pair[0]) > 1):
            yield node, f"ONNX multiplies sizes by the scale of {name} in float32, which makes other sizes"
        elif any(_is_skipped(*pair) for pair in pairs):
            yield node, f"runtimes of ONNX models skip an axis of {name} whose size its scale leaves as it is"


def _scales(node: fx.Node) -> Sequence[float]:
    return (bind(node).get("scale_factors") or ()) if base_name(node) in KINDS else ()


def _shapes(program: Program, values: Sequence[Any]) -> list[list[Sequence[int]]]:
    """The shapes of values: as recorded, and at other sizes if these are dynamic."""
    found = [[value.meta["val"].shape] for value in values]
    if program.signature.dims:
        survey = Survey(program)
        for known in filter(None, map(survey.values, sample_sizes(program, survey=survey))):
            for value, shapes in zip(values, found, strict=True):
                if value in known:  # not one within a block
                    shapes.append(known[value].shape)
    return found


def _is_uneven(sizes: set[int], scale: float) -> bool:
    """Whether the size that follows from the scale is rounded, for one size or any of a dynamic axis."""
    return scale % 1 != 0 if len(sizes) > 1 else any(size * scale % 1 for size in sizes)


def _is_rounded(sizes: set[int], scale: float) -> bool:
    """Whether float32 changes the size that follows from the scale, for one size or any of a dynamic axis."""
    if len(sizes) > 1 and math.frexp(scale)[0] * 2**FEW_BITS % 1:
        return True
    return any(int(np.float32(scale) * np.float32(size)) != int(size * scale) for size in sizes)


def _is_skipped(sizes: set[int], scale: float) -> bool:
    """Whether a size is the same afterwards, although the scale moves what lies between its elements."""
    return scale != 1 and any(int(size * scale) == size > 1 for size in sizes)
