"""Lowers the precision of matrix products and the ops between them; inputs and outputs keep their dtype.

The ops are divided as in torch.autocast: matrix products run in the low precision, ops that lose too much there (exp,
pow, sums, ...) in float32. Unlike autocast, ops between two products stay in the low precision where they can, as in a
fully converted model, because every cast is a pass over memory. Values that never reach a product, such as positions
and their angles, stay in float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from tsopt.compiler.graph import ops
from tsopt.compiler.graph.edit import fresh_name, new_call, new_weight
from tsopt.compiler.graph.infer import infer
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.origin import origin_of
from tsopt.compiler.graph.program import Numerics, Program
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.compiler.precision_names import FP32, INT4, INT8, INT8_STATIC, INT8_WEIGHTS
from tsopt.compiler.rewriting.pass_base import Changes, Done, Limits, Pass
from tsopt.compiler.rewriting.pipeline import run
from tsopt.errors import NoGain, UsageError
from tsopt.passes.quantize.dynamic import DynamicInt8
from tsopt.passes.quantize.layer_names import kept_in_float
from tsopt.passes.quantize.layers import NO_LAYER, quantized_already
from tsopt.passes.quantize.weights import Int4Weights, Int8Weights

PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "bilinear"}
    | {"conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}
    | {"scaled_dot_product_attention"}
)
# Pointwise ops that lose digits, or the range, of what they are given.
SENSITIVE = frozenset(
    {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "pow", "square", "reciprocal", "rsqrt", "sqrt", "erfinv"}
    | {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2", "lgamma"}
    | {"digamma", "logit", "floor", "ceil", "round", "trunc", "fmod", "remainder", "frac", "cumsum"}
)
# Ops that move values.
MOVING = frozenset(
    {"cat", "stack", "pad", "constant_pad_nd", "roll", "flip", "index_select", "gather", "index", "repeat"}
    | {"pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "tril", "triu", "clone", "contiguous"}
    | {"split", "split_with_sizes", "chunk", "unbind", "tensor_split", "to", "_to_copy"}
    | {"reshape", "view", "_unsafe_view", "permute", "transpose", "t", "expand", "slice", "select", "unsqueeze"}
    | {"squeeze", "flatten", "unflatten", "unfold", "movedim", "narrow", "alias", "diagonal"}
)
# Beside pointwise ops and these: their kernels add up in float32, or they choose among values.
FOLLOWING = MOVING | frozenset(
    {"softmax", "_softmax", "layer_norm", "group_norm", "rms_norm", "batch_norm", "instance_norm", "mean", "glu"}
    | {"avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"}
    | {"max_pool1d", "max_pool2d", "max_pool3d", "amax"}
    | {"upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d"}
)
# Results of these can be as large as their operands.
CARRYING = MOVING | {"add", "sub", "rsub", "mul", "neg", "where", "masked_fill", "maximum", "minimum"}
NUMBERS = ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]")  # as schemas call their types
HIDING = 1e6  # the least magnitude of the numbers that masks hide scores with; what is smaller may be data


@dataclass(frozen=True, slots=True)
class LowerPrecision(Pass):
    """Products of float32 values, and what lies between them, in `bf16` or `fp16`. LOSSY.

    Weights that are used in the low precision are stored in it.
    """

    precision: str
    keep_float: tuple[str, ...] = ()  # patterns of products that stay in float32
    numerics: ClassVar[Numerics] = Numerics.LOSSY

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.precision

    def run(self, program: Program, limits: Limits) -> Changes:
        kept = kept_in_float(products_of(program), self.keep_float)
        lowering = _Lowering(program, ops.HALVES[self.precision], limits, kept)
        lowering.run()
        done = tuple(Done("lower_product", place) for place in lowering.products)
        return Changes(done, numerics=Numerics.LOSSY if done else Numerics.EXACT)


def in_precision(program: Program, precision: str, keep_float: Sequence[str] = ()) -> Program:
    """The program with its products in `bf16` or `fp16`, or its layers in integers; itself for `fp32`.

    Args:
        keep_float: patterns of products that `bf16` and `fp16` leave in float32.

    Raises:
        NoGain: the program has no product of float32 values, or the model is quantized already.
        UsageError: it takes calibration data, or a pattern matches no product.
    """
    if precision == FP32:
        return program
    if precision == INT8_STATIC:
        raise UsageError(f"{INT8_STATIC} needs calibration data", fix="use tsopt.optimize(..., calibration=...)")
    if refused := quantized_already(program):
        raise refused
    int8: dict[str, Pass] = {INT8: DynamicInt8(largest_weight()), INT8_WEIGHTS: Int8Weights(), INT4: Int4Weights()}
    made, _ = run(
        program, (int8.get(precision) or LowerPrecision(precision, tuple(keep_float)),), Limits(Numerics.LOSSY)
    )
    if made is program and precision in int8:
        raise NoGain(NO_LAYER)
    if made is program:
        raise NoGain(f"the program has no float32 matrix products to run in {precision}")
    return made


def products_of(program: Program) -> list[fx.Node]:
    """The products of float32 values, in graph order."""
    calls = (node for node in program.calls() if _name(node) in PRODUCTS)
    return [node for node in calls if any(_dtype(value) == torch.float32 for value in node.all_input_nodes)]


def _name(node: fx.Node) -> str:
    """The name of an op without its namespace and overload; empty for another function."""
    return ops.name_of(node).split(".")[1] if ops.is_overload(node.target) else ""


class _Lowering:
    """One walk over a program, in its order."""

    def __init__(self, program: Program, low: torch.dtype, limits: Limits, kept: Container[fx.Node]) -> None:
        self.program, self.low, self.limits, self.kept = program, low, limits, kept
        self.products: list[str] = []  # where they are in the user's model
        self._was = {node: _dtype(node) for node in program.graph.nodes}
        self._wide: set[fx.Node] = set()  # float32, and larger than the low precision allows, as masks are
        self._wide_weights: dict[str, bool] = {}  # by name: whether they hold such numbers
        self._casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def run(self) -> None:
        nodes = list(self.program.graph.nodes)
        for node in nodes:
            if ops.is_call(node):
                self._lower(node)
        output = self.program.output_node
        dtypes = [getattr(torch, item.type.dtype) for item in self.program.signature.outputs]
        values = zip(self.program.outputs, dtypes, strict=True)
        output.args = (tuple(self._cast(value, dtype, output) for value, dtype in values),)
        for node in nodes:
            if node.op == "get_attr" and not node.users:
                self.program.graph.erase_node(node)

    def _lower(self, node: fx.Node) -> None:
        """Chooses the precision of a call by its op and by its operands, and types it again."""
        floats = {value for value in node.all_input_nodes if self._was[value] == torch.float32}
        name = _name(node)
        is_product = name in PRODUCTS and bool(floats) and node not in self.kept and self.limits.take()
        goes_on = any(_dtype(value) == self.low for value in floats) and _follows(node, name)
        if (is_product or goes_on) and self._retyped(node, floats, self.low):
            self.products += [origin_of(node)] * is_product
        elif floats or name == "":
            self._retyped(node, floats, torch.float32)
        if _dtype(node) == torch.float32 and self._is_wide(node, name, floats):
            self._wide.add(node)

    def _is_wide(self, node: fx.Node, name: str, floats: set[fx.Node]) -> bool:
        """Whether a result may be finite and too large for the low precision: a number in the program says so."""
        carried = name in CARRYING and any(value in self._wide or self._holds_wide(value) for value in floats)
        return carried or not _fits(node, self.low)

    def _holds_wide(self, value: fx.Node) -> bool:
        """Whether a weight has finite numbers that are too large for the low precision."""
        name = str(value.target)
        if value.op == "get_attr" and name not in self._wide_weights:
            self._wide_weights[name] = _exceeds(self.program.weights[name].detach(), torch.finfo(self.low).max)
        return value.op == "get_attr" and self._wide_weights[name]

    def _retyped(self, node: fx.Node, floats: set[fx.Node], dtype: torch.dtype) -> bool:
        """The call on operands of a dtype; False where it takes none such, and is left as it was."""
        if not _fits(node, dtype):
            return False
        cast = {value: self._cast(value, dtype, node) for value in floats}
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda value: cast.get(value, value))
        try:
            node.meta["val"] = infer(self.program, node.target, args, kwargs)
        except (RuntimeError, TypeError, ValueError):
            return False
        node.args, node.kwargs = args, kwargs
        return True

    def _cast(self, value: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        """A value in a dtype, cast once: a weight now, anything else in the call."""
        if _dtype(value) == dtype:
            return value
        key = (value, dtype)
        if key not in self._casts:
            self._casts[key] = (
                self._weight(value, dtype) if value.op == "get_attr" else self._call(value, dtype, before)
            )
        return self._casts[key]

    def _weight(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        program = self.program
        name = fresh_name(f"{value.target}.{str(dtype).removeprefix('torch.')}", program.weights)
        weight = program.weights[str(value.target)].detach()
        if dtype == self.low and self._holds_wide(value):
            weight = _bounded(weight, dtype, lambda target, *args: target(*args))
        return new_weight(program, value.next, name, weight.to(dtype))

    def _call(self, value: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
        # NOTE: before its first user: further ones come later, and placeholders stay together.
        def made(target: Any, *args: Any) -> fx.Node:
            return new_call(self.program, before, value, target, args, {})

        is_to_bound = value in self._wide and dtype == self.low
        return made(aten.to.dtype, _bounded(value, dtype, made) if is_to_bound else value, dtype)


def _bounded(value: Any, low: torch.dtype, call: Callable[..., Any]) -> Any:
    """A float32 value whose finite elements a low precision has, too; those that it has already stay.

    The numbers of masks become half of its largest one: sums with them stay finite as well. A row of -inf alone would
    be NaN after softmax.

    Args:
        call: makes or computes a call of an op.
    """
    largest = torch.finfo(low).max
    near = call(aten.clamp.default, value, -largest, largest)
    hides = call(aten.gt.Scalar, call(aten.abs.default, value), max(HIDING, largest))
    near = call(aten.where.self, hides, call(aten.mul.Tensor, near, 0.5), near)
    return call(aten.where.self, call(aten.isinf.default, value), value, near)


def _exceeds(weight: torch.Tensor, largest: float) -> bool:
    """Whether a finite element is of a larger magnitude."""
    if not weight.numel() or all(abs(float(end)) <= largest for end in torch.aminmax(weight)):
        return False
    return bool((weight[weight.isfinite()].abs() > largest).any())


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _fits(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a dtype has the numbers that are written in a call, such as the -3e38 of a mask; sizes do not count."""
    kinds = _kinds(node.target)
    return all(_has(dtype, value, whole=kinds.get(name) in NUMBERS) for name, value in ops.bind(node).items())


@functools.cache
def _kinds(target: Any) -> dict[str, str]:
    """The types of the arguments of an op, by name."""
    return {item.name: str(item.type) for item in target._schema.arguments} if ops.is_overload(target) else {}


def _has(dtype: torch.dtype, value: object, *, whole: bool) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_has(dtype, item, whole=whole) for item in value)
    if not isinstance(value, float) and not (whole and isinstance(value, int)):
        return True
    return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max


def _follows(node: fx.Node, name: str) -> bool:
    """Whether an op may be computed in the precision of its operands."""
    target: Any = node.target
    if target is aten.view.dtype:
        return False  # it reads the bits of its operand
    return name in FOLLOWING or (name not in SENSITIVE and torch.Tag.pointwise in getattr(target, "tags", ()))
