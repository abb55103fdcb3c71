"""The optimizer of the ONNX exporter, without its rewrite rules if these would mistake one constant for another.

The rules match constants with a tolerance: a scalar of at most 1e-8 counts as 0, and one close to 1, 3 or 6 as that
number. `x / (norm + 1e-8)` would lose its epsilon and give NaN for a row of zeros. A model that holds such a constant
only has its constants folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Constant in a rule -> the distance within which a number is matched (as in onnxscript.rewriter, rounded up).
KNOWN = {0.0: 2e-8, 1.0: 2e-5, 3.0: 6e-4, 6.0: 12e-4}


def optimize(made: Any, *, by_rules: bool) -> None:
    """Optimizes an exported model in place.

    Args:
        made: an ONNXProgram that has not been optimized.
        by_rules: apply the rewrite rules too, unless they would mistake a constant.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer

    optimizer.inline(made.model)
    optimizer.fold_constants(made.model)  # the result may be such a constant
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
