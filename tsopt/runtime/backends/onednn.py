"""Runs the Program with torch and its layers with oneDNN: weights prepacked, activation and residual sum fused.

These are the kernels that torch.compile's freezing uses. A packed convolution returns channels-last memory, so a
network keeps one memory layout and no conversions are left between its layers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import provenance
from tsopt.compiler.graph.program import Program, tensor_type
from tsopt.compiler.graph.quantized import quantized_layer
from tsopt.compiler.graph.serialize import write_program
from tsopt.errors import NoGain
from tsopt.runtime.backends.backend import Unsupported
from tsopt.runtime.backends.eager import torch_runner
from tsopt.runtime.backends.layer_sites import LAYERS, LOSES_NAN, Site, each, sample, site_of
from tsopt.runtime.backends.onednn_int8 import is_integer_convolution, lower_int8, run_layer
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.profiling.kernels import Timed
from tsopt.runtime.profiling.op_by_op import timed
from tsopt.runtime.thread_count import torch_threads

MEASURED = "measured.json"
ROUNDS = 5  # timed calls of each kernel for a layer; the fastest counts
# Of the largest value: a kernel further away than that is broken, not rounding.
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}

VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True, slots=True)
class OneDnnBackend:
    """Packed and fused layers.

    threads: intra-op threads during a call; None leaves torch's own setting.
    """

    threads: int | None = None
    name: str = "onednn"

    def missing(self) -> str | None:
        if not torch.backends.mkldnn.is_available():
            return "needs a torch build with oneDNN (MKL-DNN)"
        known = all(hasattr(torch.ops.mkldnn, name) for name in ("_convolution_pointwise", "_linear_pointwise"))
        return None if known else "needs a torch build with the fused oneDNN operators"

    def unsupported(self, program: Program) -> list[Unsupported]:
        by_strides = next((node for node in program.calls() if node.target in ops.BY_STRIDES), None)
        if by_strides is not None:
            return [Unsupported(by_strides.name, f"{ops.name_of(by_strides)} depends on the strides of its input")]
        if not any(_is_layer(program, node) or quantized_layer(program, node) for node in program.calls()):
            return [Unsupported("", "no convolution or linear layer with constant floating-point weights on the CPU")]
        return []

    def compile(self, program: Program) -> Executable:
        """Raises NoGain where torch's own kernels are the faster ones for every layer."""
        with torch_threads(self.threads):  # that the layers are measured with
            return self._executable(program, lower(program))

    def profile(self, program: Program, inputs: Sequence[Any]) -> Timed:
        with torch_threads(self.threads):
            return timed(lower(program).program, inputs)

    def reopen(self, program: Program, directory: Path) -> Executable:
        faster = json.loads((directory / MEASURED).read_text())
        with torch_threads(self.threads):  # for kinds of layers that have not been measured
            return self._executable(program, lower(program, faster))

    def _executable(self, program: Program, lowered: Lowered) -> Executable:
        if not lowered.packed and not lowered.on_integers:
            raise NoGain(
                "torch's own kernels are at least as fast for every layer",
                fix="no action needed: eager already runs these kernels",
            )

        def save(directory: Path) -> None:
            write_program(program, directory)  # packed weights fit only this machine and are packed again on load

        def hand_over(directory: Path) -> None:
            (directory / MEASURED).write_text(json.dumps(lowered.faster))

        made = Executable(
            self.name,
            program.signature,
            torch_runner(lowered.program.module().forward, program.signature, self.threads),
            state=[program.state[item.name] for item in program.signature.state_inputs],
            save=save,
            hand_over=hand_over,
            options={"threads": self.threads},
            notes=lowered.said,
        )
        made.int8 = tuple(lowered.int8)
        return made


@dataclass
class Lowered:
    """A program whose layers call oneDNN. It runs, but is no Program any more: packed weights have no type.

    Attributes:
        weights: names of packed weights, by layer.
        faster: whether oneDNN's kernel is the faster one, by kind of layer.
        int8: of the layers that the program computes on 8-bit integers, in graph order: whether each runs so.
    """

    program: Program
    layers: int = 0
    packed: int = 0
    int8: list[bool] = field(default_factory=list)
    weights: dict[tuple[Any, ...], str] = field(default_factory=dict)
    faster: dict[str, bool] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def quantized(self) -> int:
        """How many layers the program computes on 8-bit integers."""
        return len(self.int8)

    @property
    def on_integers(self) -> int:
        """How many of these run so."""
        return sum(self.int8)

    @property
    def said(self) -> list[str]:
        """What a report says of it."""
        layers = f"{self.packed} of {self.layers} layers run with oneDNN, the others with torch"
        if not self.quantized:
            return [layers, *self.notes]
        said = [f"{self.on_integers} of {self.quantized} layers run in int8, the others in float32"]
        return [*said, *([f"in float32, {layers}"] if self.layers else []), *self.notes]


def lower(program: Program, faster: Mapping[str, bool] | None = None) -> Lowered:
    """Puts oneDNN's kernel for each layer where it is supported, right, and faster on this machine.

    Args:
        faster: what has been measured before.
    """
    made = Lowered(program.copy(), faster=dict(faster or {}))
    made.int8 = lower_int8(made.program, made.faster)
    if made.quantized and not made.on_integers:
        raise NoGain("no layer is faster in int8 on this machine")
    graph = made.program.graph
    for node in list(graph.nodes):
        if node.target in VIEWS:
            node.target = aten.reshape.default  # a channels-last value cannot always be viewed
        if _is_layer(made.program, node):
            made.layers += 1
            _lower_layer(made, node)
    _restore_outputs(made.program)
    return made


def _is_layer(program: Program, node: fx.Node) -> bool:
    if node.target not in LAYERS:
        return False
    call = ops.bind(node)
    weight = program.weights.get(str(call["weight"].target)) if call["weight"].op == "get_attr" else None
    if weight is None or weight.dtype not in CLOSE or weight.device.type != "cpu" or not weight.numel():
        return False
    if node.target is aten.linear.default and weight.dim() != 2:
        return False
    value = call["input"].meta["val"]
    batched = node.target is aten.linear.default or value.dim() == weight.dim()
    return bool(batched and value.dim() > 1 and value.numel() and node.meta["val"].numel())


def _lower_layer(made: Lowered, layer: fx.Node) -> None:
    site = site_of(layer)
    call = ops.bind(layer)
    program = made.program
    weight = program.weights[str(call["weight"].target)]
    rows = call["input"].meta["val"].shape
    geometry = tuple(str(call[key]) for key in ("stride", "padding", "dilation", "groups") if key in call)
    packing = (str(call["weight"].target), geometry, tuple(rows))
    kind = str((*packing[1:], tuple(weight.shape), call["bias"] is None, site.other is None, site.activation))
    if made.faster.get(kind) is False:
        return
    try:
        packed = program.weights[made.weights[packing]] if packing in made.weights else _pack(layer, call, weight)
        if kind not in made.faster:
            made.faster[kind] = _is_faster(site, call, weight, packed)
    except RuntimeError:  # this build of oneDNN has no kernel for the layer: torch runs it as before
        made.faster[kind] = False
    if not made.faster[kind]:
        return
    name = made.weights.setdefault(packing, f"{call['weight'].target}.packed{len(made.weights)}")
    program.weights[name] = packed
    with program.graph.inserting_before(site.end):
        held = program.graph.create_node("get_attr", name)
        target, args = _kernel(site, call, call["input"], site.other, held, call["bias"])
        fused = program.graph.call_function(target, args)
    fused.meta = dict(site.end.meta) | provenance(site.layer.meta)
    chain = site.chain
    site.end.replace_all_uses_with(fused)
    for dead in reversed(chain):
        program.graph.erase_node(dead)
    made.packed += 1
    if site.activation[0] in ("relu", "hardtanh") and not made.notes:
        made.notes.append(LOSES_NAN)


def _pack(layer: fx.Node, call: dict[str, Any], weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach().contiguous()
    sizes = list(call["input"].meta["val"].shape)
    if layer.target is aten.linear.default:
        rows = torch.Size(sizes[:-1]).numel()
        return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]
    spatial = weight.dim() - 2
    padding, stride, dilation = (each(call[key], spatial) for key in ("padding", "stride", "dilation"))
    return torch.ops.mkldnn._reorder_convolution_weight(  # type: ignore[no-any-return]
        weight, padding, stride, dilation, call["groups"], sizes
    )


def _kernel(
    site: Site, call: dict[str, Any], x: Any, other: Any, weight: Any, bias: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The fused call on nodes or on tensors."""
    kind, scalars, algorithm = site.activation
    if site.layer.target is aten.linear.default:
        if other is not None:
            return torch.ops.mkldnn._linear_pointwise.binary, (x, other, weight, bias, "add")
        return torch.ops.mkldnn._linear_pointwise.default, (x, weight, bias, kind, scalars, algorithm)
    spatial = len(site.layer.meta["val"].shape) - 2
    padding, stride, dilation = (each(call[key], spatial) for key in ("padding", "stride", "dilation"))
    geometry = (padding, stride, dilation, call["groups"])
    if other is None:
        return torch.ops.mkldnn._convolution_pointwise.default, (x, weight, bias, *geometry, kind, scalars, algorithm)
    unary = None if kind == "none" else kind
    return torch.ops.mkldnn._convolution_pointwise.binary, (
        *(x, other, weight, bias, *geometry),
        *("add", 1.0, unary, scalars, algorithm or None),
    )


def _is_faster(site: Site, call: dict[str, Any], weight: torch.Tensor, packed: torch.Tensor) -> bool:
    """Times the layer both ways on random values; a kernel that answers something else is out."""
    draw = torch.Generator().manual_seed(0)
    x = sample(tensor_type(call["input"]).shape, weight.dtype, draw)
    other = None if site.other is None else sample(tensor_type(site.other).shape, weight.dtype, draw)
    bias = None if call["bias"] is None else sample(tensor_type(call["bias"]).shape, weight.dtype, draw)
    target, args = _kernel(site, call, x, other, packed, bias)
    chain = site.chain

    def plain() -> Any:
        values: dict[fx.Node, Any] = {call["input"]: x, call["weight"]: weight.detach()}
        values |= {node: value for node, value in ((site.other, other), (call["bias"], bias)) if node is not None}
        for node in chain:
            made, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            run: Any = node.target
            values[node] = run(*made, **kwargs)
        return values[site.end]

    def fused() -> Any:
        return target(*args)

    with torch.no_grad():
        wanted = plain()
        difference = (fused() - wanted).abs().max()
        if not difference <= CLOSE[weight.dtype] * max(1.0, float(wanted.abs().max())):
            return False
        best = [float("inf"), float("inf")]
        for _ in range(ROUNDS):
            for position, run in enumerate((plain, fused)):
                run()
                start = time.perf_counter()
                run()
                best[position] = min(best[position], time.perf_counter() - start)
    return best[1] < best[0]


def _restore_outputs(program: Program) -> None:
    """Outputs leave in the order in memory that eager gives them, for what callers view is a matter of it."""
    graph, output = program.graph, program.output_node
    values, may_differ = list(program.outputs), _behind_convolutions(program)
    for position, (value, item) in enumerate(zip(values, program.signature.outputs, strict=True)):
        steps = item.type.stride
        if value not in may_differ or (not item.type.contiguous and 0 in steps):
            continue
        with graph.inserting_before(output):
            if item.type.contiguous:
                made = graph.call_function(aten.contiguous.default, (value,))
            else:
                order = sorted(range(len(steps)), key=lambda axis: -steps[axis])
                back = [order.index(axis) for axis in range(len(order))]
                made = graph.call_function(in_order, (value, order, back))
        made.meta = dict(value.meta)
        values[position] = made
    output.args = (tuple(values),)


def _behind_convolutions(program: Program) -> set[fx.Node]:
    """The values that may be channels-last where eager's are not: those behind convolutions, up to linear layers."""
    found: set[fx.Node] = set()
    for node in program.calls():
        name = ops.name_of(node)
        is_convolution = is_integer_convolution(node) or name.startswith("mkldnn._convolution_pointwise")
        is_linear = node.target is run_layer or name.startswith(("aten.linear", "mkldnn._linear_pointwise"))
        if is_convolution or (not is_linear and not found.isdisjoint(node.all_input_nodes)):
            found.add(node)
    return found


def in_order(value: torch.Tensor, order: list[int], back: list[int]) -> torch.Tensor:
    """A value whose axes lie in memory in an order, the outermost first; itself where they do.

    Args:
        back: the inverse of the order.
    """
    turned = value.permute(order)
    if turned.is_contiguous():
        return value
    steps = [step for size, step in zip(turned.shape, turned.stride(), strict=True) if size > 1]
    if steps == sorted(steps, reverse=True):
        return value
    return turned.contiguous().permute(back)
