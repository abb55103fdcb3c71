"""Programs as expressions for Z3, one element at a time, and whether those are what torch computes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import z3
from torch import fx

from tests.passes.helpers import SPECIAL, aten
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.program import Program

NEAREST = z3.RNE()
SORTS = {
    torch.float16: z3.FPSort(5, 11), torch.float32: z3.Float32(), torch.float64: z3.Float64(),
    torch.bool: z3.BoolSort(), torch.int8: z3.BitVecSort(8), torch.int16: z3.BitVecSort(16),
    torch.int32: z3.BitVecSort(32), torch.int64: z3.BitVecSort(64),
}  # fmt: skip


def literal(value: Any, dtype: torch.dtype) -> Any:
    """A Python number as eager takes it in an operation of this dtype."""
    if dtype == torch.bool:
        return z3.BoolVal(bool(value))
    if not dtype.is_floating_point:
        return z3.BitVecVal(int(value), SORTS[dtype])
    # NOTE: torch computes float16 with a float32 literal, which is one rounding only where the literal is a float16.
    assert dtype != torch.float16 or math.isnan(value) or float(torch.tensor(value).half()) == value
    return z3.FPVal(float(value), SORTS[dtype])


def cast(x: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Every cast but those of floats to integers, whose values out of range are the machine's own."""
    if source == target:
        return x
    if source == torch.bool:
        return z3.If(x, literal(1, target), literal(0, target))
    if target == torch.bool:
        return z3.Not(z3.fpIsZero(x)) if source.is_floating_point else x != literal(0, source)
    if target.is_floating_point:
        return (z3.fpFPToFP if source.is_floating_point else z3.fpSignedToFP)(NEAREST, x, SORTS[target])
    assert not source.is_floating_point, f"no expression for {source} to {target}"
    bits = x.size() - SORTS[target].size()
    return z3.Extract(SORTS[target].size() - 1, 0, x) if bits >= 0 else z3.SignExt(-bits, x)


def _arithmetic(on_floats: Callable[..., Any], on_integers: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of two operands in the dtype of its result, which is rounded once."""
    return lambda t, x, y: on_floats(NEAREST, x, y) if t.is_floating_point else on_integers(x, y)


def divide(x: Any, y: Any) -> Any:
    raise AssertionError("the result of a division is a float")


ADD, SUB = _arithmetic(z3.fpAdd, operator.add), _arithmetic(z3.fpSub, operator.sub)
MUL, DIV = _arithmetic(z3.fpMul, operator.mul), _arithmetic(z3.fpDiv, divide)


def without_alpha(operation: Callable[..., Any]) -> Callable[..., Any]:
    def compute(t: torch.dtype, x: Any, y: Any, alpha: Any) -> Any:
        assert alpha == 1, "with alpha it is another operation, that may round once or twice"
        return operation(t, x, y)

    return compute


def less(t: torch.dtype, x: Any, y: Any) -> Any:
    return z3.fpLT(x, y) if t.is_floating_point else x < y


def clamp(t: torch.dtype, x: Any, low: Any = None, high: Any = None) -> Any:
    """NaN goes through, and so does a zero of the other sign than the bound."""
    x = x if low is None else z3.If(less(t, x, literal(low, t)), literal(low, t), x)
    return x if high is None else z3.If(less(t, literal(high, t), x), literal(high, t), x)


def power(t: torch.dtype, x: Any, n: Any) -> Any:
    """The powers that torch's pow treats by themselves; nothing is known here of the others."""
    return {1: x, 2: MUL(t, x, x)}[n]


def positive(name: str) -> Callable[..., Any]:
    """A function that is not looked into, but for its sign: none."""
    return lambda t, x: z3.fpAbs(z3.Function(name, SORTS[t], SORTS[t])(x))


# What an op computes of one element, from the dtype of its result, the operands in that dtype, and the other arguments.
OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: without_alpha(ADD),
    aten.sub.Tensor: without_alpha(SUB),
    aten.rsub.Scalar: without_alpha(lambda t, x, y: SUB(t, y, x)),
    aten.mul.Tensor: MUL,
    aten.div.Tensor: DIV,
    aten.div.Tensor_mode: lambda t, x, y, mode: {"trunc": x / y}[mode],
    aten.neg.default: lambda t, x: z3.fpNeg(x) if t.is_floating_point else -x,
    aten.abs.default: lambda t, x: z3.fpAbs(x) if t.is_floating_point else z3.If(x < 0, -x, x),
    aten.relu.default: lambda t, x: clamp(t, x, 0),
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.square.default: lambda t, x: MUL(t, x, x),
    aten.pow.Tensor_Scalar: power,
    aten.exp.default: positive("exp"),
    aten.sigmoid.default: positive("sigmoid"),
    aten.logical_not.default: lambda t, x: z3.Not(x),
    aten.masked_fill.Scalar: lambda t, x, mask, value: z3.If(mask, value, x),
    aten.masked_fill.Tensor: lambda t, x, mask, value: z3.If(mask, value, x),
    aten.where.self: lambda t, mask, x, y: z3.If(mask, x, y),
    aten.to.dtype: lambda t, x, *_: x,
    aten.flip.default: lambda t, x, dims: x,
}
for name in ("ScalarOther", "ScalarSelf"):
    OPERATIONS[getattr(aten.where, name)] = OPERATIONS[aten.where.self]
COMPARISONS: dict[Any, Callable[..., Any]] = {
    aten.gt.Tensor: lambda t, x, y: less(t, y, x),
    aten.gt.Scalar: lambda t, x, y: less(t, y, x),
    aten.lt.Tensor: less,
    aten.le.Tensor: lambda t, x, y: z3.fpLEQ(x, y) if t.is_floating_point else x <= y,
}
MASKS = ("mask", "condition")
SETTINGS = (
    "alpha",
    "exponent",
    "rounding_mode",
    "min",
    "max",
    "dtype",
    "non_blocking",
    "copy",
    "memory_format",
    "dims",
)


def expression(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The outputs, each of one element, as expressions of the inputs. A weight that is one number is that number."""
    given = iter(inputs)
    values: dict[fx.Node, Any] = {}

    def operand(value: Any, wanted: torch.dtype) -> Any:
        if isinstance(value, fx.Node):
            return cast(values[value], value.meta["val"].dtype, wanted)
        return literal(value, wanted)

    def of_call(node: fx.Node) -> Any:
        wanted = node.meta["val"].dtype
        if node.target in COMPARISONS:
            sides = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args]
            wanted = torch.result_type(*sides)
        kinds = [(k, torch.bool if k in MASKS else wanted, v) for k, v in ops.bind(node).items()]
        arguments = [value if name in SETTINGS else operand(value, dtype) for name, dtype, value in kinds]
        return (OPERATIONS | COMPARISONS)[node.target](wanted, *arguments)

    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            weight = program.weights[str(node.target)]
            uniform = len(set(map(repr, weight.reshape(-1).tolist()))) == 1
            first = weight.reshape(-1)[0].item()
            values[node] = literal(first, weight.dtype) if uniform else z3.Const(str(node.target), SORTS[weight.dtype])
        elif ops.is_call(node):
            values[node] = of_call(node)
    return [values[output] for output in program.outputs]


def value_of(number: Any, dtype: torch.dtype) -> Any:
    """A constant expression: a number, or its bits, which tell -0.0 from 0.0."""
    if dtype == torch.bool:
        return z3.is_true(number)
    if not dtype.is_floating_point:
        return number.as_signed_long()
    if z3.is_true(z3.simplify(z3.fpIsNaN(number))):
        return "nan"
    return z3.simplify(z3.fpToIEEEBV(number)).as_signed_long()


def value_in(element: torch.Tensor) -> Any:
    if not element.is_floating_point():
        return element.item()
    views = {torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
    return "nan" if bool(element.isnan()) else element.view(views[element.dtype]).item()


def hard(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    return torch.tensor([0, 1, -1, 7, limits.min, limits.max, limits.min + 1], dtype=dtype)


UNKNOWN = (aten.exp.default, aten.sigmoid.default)


def assert_expressions_of_torch(program: Program, dtypes: Sequence[torch.dtype]) -> None:
    """Value by value, over the hardest ones."""
    if any(node.target in UNKNOWN for node in program.calls()):
        return
    columns = [hard(dtype).roll(5 * i).repeat(9)[:18] for i, dtype in enumerate(dtypes)]
    wanted = [row[0] for row in program.module()(*[column.unsqueeze(1).expand(18, 2) for column in columns])[0]]
    for i, element in enumerate(wanted):
        inputs = [literal(column[i].item(), column.dtype) for column in columns]
        found = z3.simplify(expression(program, inputs)[0])
        if any(str(name) in str(found) for name in program.weights):
            continue  # of a weight of several numbers
        assert value_of(found, element.dtype) == value_in(element), (i, inputs, found, element)
