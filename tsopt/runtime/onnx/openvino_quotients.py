"""Quotients that OpenVINO must divide for, because a later call rounds or compares them.

It multiplies by the inverse of a divisor instead: 21 / 7 becomes 3.0000002, of which `ceil` makes 4. Imports no torch,
for bundles do without it.
"""

from __future__ import annotations

from typing import Any

KEPT = "nonconvertable_divide_0"  # OpenVINO's own attribute of a division that stays one
BLOCKS = frozenset({"If", "Loop", "TensorIterator"})
JUMPS = BLOCKS | {
    *("Floor", "Ceiling", "Round", "Sign", "Mod", "FloorMod", "Bucketize", "SearchSorted"),
    *("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual", "NonZero", "Unique", "NonMaxSuppression"),
}
ROUNDING = "FakeQuantize"
# Each number that these make is rounded anew, as a sum of many products: of whole numbers, they make no whole ones.
MIXING = frozenset(
    {
        *("MatMul", "Einsum", "Convolution", "GroupConvolution", "DeformableConvolution", "BinaryConvolution"),
        *("ConvolutionBackpropData", "GroupConvolutionBackpropData", "ScaledDotProductAttention"),
        *("Softmax", "LogSoftmax", "MVN", "BatchNormInference", "GroupNormalization", "NormalizeL2", "LRN"),
        *(f"{kind}{form}" for kind in ("LSTM", "GRU", "RNN") for form in ("Cell", "Sequence")),
    }
)


def keep_divisions(model: Any, *, rounding: bool = True) -> None:
    """Marks the divisions of an OpenVINO model whose quotients are rounded or compared, and all those in blocks.

    Args:
        rounding: to integers with a scale counts as well; tsopt's own may be off by one step.
    """
    operations = model.get_ordered_ops()
    jumps = [item for item in operations if _is_jump(item, rounding)]
    seen: set[str] = set()
    while jumps:
        for value in jumps.pop().input_values():
            source = value.get_node()
            name = source.get_friendly_name()
            if name in seen or not value.get_element_type().is_real():
                continue
            seen.add(name)
            _mark(source)
            if source.get_type_name() not in MIXING:
                jumps.append(source)
    for item in operations:
        for block in _blocks(item):
            for inner in block.get_ordered_ops():
                _mark(inner)
            keep_divisions(block)


def _mark(item: Any) -> None:
    if item.get_type_name() == "Divide":
        item.get_rt_info()[KEPT] = True


def _is_jump(item: Any, rounding: bool) -> bool:
    kind = item.get_type_name()
    if kind == "Convert":
        return item.get_input_element_type(0).is_real() and not item.get_output_element_type(0).is_real()
    if kind == "GridSample":
        return bool(item.get_attributes()["mode"] == "nearest")
    return kind in JUMPS or (rounding and kind == ROUNDING)


def _blocks(item: Any) -> list[Any]:
    """The models within a branch or a loop."""
    kind = item.get_type_name()
    if kind == "If":
        return [item.get_function(position) for position in (0, 1)]
    return [item.get_function()] if kind in BLOCKS else []
