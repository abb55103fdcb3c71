"""The ONNX exporter's optimizer, without its rules where those would take a number for another.

Its rules take a scalar for 0 that is at most 1e-8, and for 1, 3 or 6 what is near to it: `x / (norm + 1e-8)` would lose
its epsilon, and be NaN where there is nothing to divide. In a model with such numbers only constants are folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# What the rules know -> how far a number may be away that they take for it (onnxscript.rewriter, a little more).
KNOWN = {0.0: 2e-8, 1.0: 2e-5, 3.0: 6e-4, 6.0: 12e-4}


def optimize(made: Any, *, by_rules: bool) -> None:
    """Optimizes an exported model in place.

    Args:
        made: an ONNXProgram that has not been optimized.
        by_rules: by rules as well, where they mistake nothing.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(made.model)
    optimizer.fold_constants(made.model)  # a number may come from others
    if by_rules and not any(map(_is_mistaken, _scalars(made.model))):
        made.optimize()
        return
    for cleanup in (
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
    ):
        cleanup(made.model)


def _scalars(model: Any) -> Iterator[float]:
    import onnx_ir

    for node in model.graph.all_nodes():
        for value in node.inputs:
            tensor = None if value is None else onnx_ir.convenience.get_const_tensor(value)
            if tensor is not None and not tensor.shape.rank() and tensor.dtype.is_floating_point():
                yield float(tensor.numpy())


def _is_mistaken(number: float) -> bool:
    return any(number != known and abs(number - known) <= distance for known, distance in KNOWN.items())
