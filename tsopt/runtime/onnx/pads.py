"""Pads in front of pooling, which ONNX Runtime must not merge into it.

ONNX Runtime replaces a Pad of zeros by padding of the pooling behind it. But MaxPool pads with -inf, and both MaxPool
and AveragePool refuse padding that is as large as their kernel. A Pad that names its axes stays (pad_fusion.cc of ONNX
Runtime 1.31).
"""

from __future__ import annotations

from typing import Any

import numpy as np

POOLING = ("MaxPool", "AveragePool")
AXES, SINCE = 3, 18  # the position of this input of a Pad; the first opset that has it


def keep_pads(model: Any) -> None:
    """Has Pads in front of pooling name their axes, in place."""
    if model.graph.opset_imports.get("", 0) < SINCE:
        return
    for node in list(model.graph.all_nodes()):
        pad = _pad_before(node) if node.op_type in POOLING and not node.domain else None
        if pad is not None and len(pad.inputs) <= AXES:
            _name_axes(model.graph, pad)


def _pad_before(node: Any) -> Any:
    """The Pad whose result it reads, converted or as it is."""
    before = node.inputs[0].producer()
    if before is not None and before.op_type == "Cast":
        before = before.inputs[0].producer()
    return before if before is not None and before.op_type == "Pad" else None


def _name_axes(graph: Any, pad: Any) -> None:
    import onnx_ir

    ends = onnx_ir.convenience.get_const_tensor(pad.inputs[1])
    if ends is None:  # computed: it is not merged
        return
    axes = onnx_ir.tensor(np.arange(ends.size // 2), name=f"{pad.outputs[0].name}_axes")
    value = onnx_ir.val(axes.name, const_value=axes)
    graph.register_initializer(value)
    pad.resize_inputs(AXES + 1)
    pad.replace_input_with(AXES, value)
