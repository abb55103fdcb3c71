"""Calls that the ONNX exporter translates incorrectly, or an engine computes incorrectly: refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.large_terms import Rounding, roundings
from tsopt.compiler.analysis.ranged_call import base_name
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.control import all_calls
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.onnx.scaled_sizes import ANTIALIASED, mistaken_scales
from tsopt.runtime.onnx.scattered_sums import loses_terms

SHIFTS = frozenset({"lshift", "rshift", "bitwise_left_shift", "bitwise_right_shift"})
MEANS = frozenset({"mean", "var", "std", "var_mean", "std_mean"})


def of_the_exporter(program: Program) -> list[Unsupported]:
    """What the exporter translates incorrectly, for every engine."""
    found = list(_found(program, _by_the_exporter))
    return found + [Unsupported(origin_of(node), why) for node, why in mistaken_scales(program)]


def of_openvino(program: Program) -> list[Unsupported]:
    """What OpenVINO computes differently from the ONNX standard."""
    return [*_found(program, _by_openvino), *_rounding(program, "OpenVINO", lambda _: True)]


def of_onnx_runtime(program: Program, threads: int) -> list[Unsupported]:
    """What ONNX Runtime computes differently in so many threads."""
    found = list(_rounding(program, "ONNX Runtime", _is_lost))
    return found + (list(_found(program, _in_several_threads)) if threads > 1 else [])


def _found(program: Program, why: Callable[[fx.Node], str]) -> Iterator[Unsupported]:
    for node in all_calls(program):
        if ops.is_overload(node.target) and (reason := why(node)):
            yield Unsupported(origin_of(node), reason)


def _rounding(program: Program, engine: str, is_wrong: Callable[[Rounding], bool]) -> Iterator[Unsupported]:
    for found in roundings(program):
        if is_wrong(found):
            why = f"{engine} does not round as PyTorch does where {found.term} is added and then subtracted"
            yield Unsupported(origin_of(found.node), why)


def _is_lost(rounding: Rounding) -> bool:
    """ONNX Runtime makes a tensor part of the layer before it, and computes float16 in float32 on the CPU."""
    is_wide = rounding.dtype == torch.float16 and ops.tensors_of(rounding.node.meta["val"])[0].device.type == "cpu"
    return rounding.by_tensor or is_wide


def _is_whole(strided: fx.Node, x: fx.Node) -> bool:
    """Whether the elements of a value lie one after another from where a call counts: an input may lie anywhere."""
    value, pending = x.meta["val"], [x]
    if not value.is_contiguous() or value.storage_offset():
        return False
    if ops.bind(strided)["storage_offset"] is None:
        return True
    while pending:
        source = pending.pop()
        if source.op == "placeholder":
            return False
        pending += ops.may_alias(source)
    return True


def _by_the_exporter(node: fx.Node) -> str:
    name = base_name(node)
    call = ops.bind(node)
    x: Any = next(iter(node.all_input_nodes), None)
    value: Any = x.meta.get("val") if x is not None else None
    if node.target in ops.STRIDED and not (_is_whole(node, x) and ops.reads_within(node, value)):
        return f"{ops.name_of(node)} reads memory that is not part of its argument"
    if name == "scatter_reduce" and call["reduce"] == "mean":
        return "the ONNX exporter makes a sum of scatter_reduce with reduce='mean'"
    if call.get("divisor_override") is not None:
        return f"the ONNX exporter leaves out divisor_override of {ops.name_of(node)}"
    if name in SHIFTS and value is not None and not value.dtype.is_signed:
        return f"the ONNX exporter makes signed integers of what {ops.name_of(node)} shifts"
    if name in MEANS and value is not None and any(isinstance(size, int) and size == 0 for size in value.shape):
        return f"runtimes of ONNX models do not answer NaN for {ops.name_of(node)} of nothing"
    return ""


def _by_openvino(node: fx.Node) -> str:
    name = base_name(node)
    if name in ANTIALIASED:
        return f"OpenVINO computes other weights for {ops.name_of(node)}"
    call = ops.bind(node)
    if not call.get("ceil_mode") or "pool" not in name:
        return ""
    edges = [_last_window(node, call, axis) for axis in range(-int(name[-2]), 0)] if name[-1] == "d" else []
    if name.startswith("avg_pool") and call["count_include_pad"] and any(is_ragged for _, is_ragged in edges):
        return f"OpenVINO divides the last windows of {ops.name_of(node)} with ceil_mode by another number"
    if name.startswith("max_pool") and any(is_dropped for is_dropped, _ in edges):
        return f"OpenVINO keeps a window of {ops.name_of(node)} with ceil_mode that begins in the padding"
    return ""


def _in_several_threads(node: fx.Node) -> str:
    if not loses_terms(node) or ops.tensors_of(node.meta["val"])[0].device.type != "cpu":
        return ""
    return (
        f"ONNX Runtime loses terms of {ops.name_of(node)} with accumulate=True and several indices in several threads"
    )


def _last_window(node: fx.Node, call: ops.Arguments, axis: int) -> tuple[bool, bool]:
    """Whether the last window that fits in by rounding up begins behind the values, and whether one is cut."""

    def of(key: str, usual: Any = 1) -> Any:
        given = call.get(key) or [usual]
        return given if isinstance(given, int) else given[axis] if len(given) > 1 else given[0]

    x: Any = node.args[0]
    size, kernel, padding = x.meta["val"].shape[axis], of("kernel_size"), of("padding", 0)
    step = of("stride", kernel)
    if not isinstance(size, int):
        return False, bool(padding)
    room = size + 2 * padding - of("dilation") * (kernel - 1) - 1
    windows = -(-room // step) + 1
    return (windows - 1) * step >= size + padding, bool(room % step and padding)
