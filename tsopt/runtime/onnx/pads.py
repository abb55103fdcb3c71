"""Pads in front of pooling, which ONNX Runtime must not merge into it.

ONNX Runtime replaces a Pad of zeros by padding of the pooling behind it. But MaxPool pads with -inf, AveragePool may
leave its padding out of its means, and both refuse padding that is as large as their kernel. It does so wherever the
pooling has the attribute `pads` and the Pad does not name its axes (pad_fusion.cc of ONNX Runtime 1.31). So pooling
without padding goes without the attribute, whose default is 0, and Pads in front of other pooling name their axes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

POOLING = ("MaxPool", "AveragePool")
AXES_SINCE = 18  # the opset
AXES = 3  # the position of this input of a Pad


def keep_pads(model: Any) -> None:
    """Changes a model in place so that no Pad is merged into pooling."""
    has_axes = model.graph.opset_imports.get("", 0) >= AXES_SINCE
    for node in list(model.graph.all_nodes()):
        pad = _pad_before(node) if node.op_type in POOLING and not node.domain else None
        own = node.attributes.get("pads")
        if pad is None or own is None:
            continue
        if not any(own.as_ints()):
            del node.attributes["pads"]
        elif has_axes and len(pad.inputs) <= AXES:
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
    if ends is None:
        return
    axes = onnx_ir.tensor(np.arange(ends.shape[0] // 2), name=f"{pad.outputs[0].name}_axes")
    value = onnx_ir.Value(name=axes.name, shape=axes.shape, type=onnx_ir.TensorType(axes.dtype), const_value=axes)
    graph.register_initializer(value)
    pad.resize_inputs(AXES + 1)
    pad.replace_input_with(AXES, value)
