"""Literals and constant tensors: canonicalized, merged, and masks that have no effect are removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tsopt.compiler.analysis.jumps import is_cut, is_power_of_two
from tsopt.compiler.analysis.large_terms import absorbs
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import Site, rule

PROMOTES = "the constant changes the dtype or the shape"
OUT_OF_RANGE = "the merged factor would not be a normal number"
OVERFLOWS = "the first factor may overflow where the merged one does not"
CUT = "a later call rounds or compares the result, which may be a whole number only if it is rounded twice"
ABSORBS = "adding a term this large rounds the value, possibly on purpose"
SIDES = "in half precision, the kernel rounds a single number on the left only"

PRODUCTS, SUMS = (aten.mul.Tensor, aten.div.Tensor), (aten.add.Tensor, aten.sub.Tensor)
# What `op(x, w)` is called when the constant w is a literal.
LITERAL_FORMS: dict[Any, Any] = {
    **{op: op for op in (*SUMS, *PRODUCTS)},
    **{
        getattr(aten, name).Tensor: getattr(aten, name).Scalar
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod")
    },
}
LARGEST = 1 << 20  # elements of a constant to merge: others may still use the one it was made of
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
HALVES = (torch.float16, torch.bfloat16)


# ---- one way to write them ----------------------------------------------------------------------------------


def literal_of(at: Site, x: object, constant: object) -> int | float | None:
    """The literal that a constant operand of x can be written as; None where anything would change.

    Such a constant is one number, however often. A literal reaches the kernels as a 0-d float64 or int64 tensor, which
    holds every value of the narrower types: the same number is cast to the same common dtype, provided that the
    constant promotes no more than a literal does.
    """
    value = at.value(constant)
    if value is None or not at.is_tensor(x) or at.type(x).shape != at.type(at.root).shape:
        return None
    # NOTE: on other devices the kernels differ: CUDA divides by a tensor, but multiplies by the inverse of a literal.
    own, number = x.meta["val"], number_in(value) if value.device.type == "cpu" else None
    if number is None or not own.dtype == torch.result_type(own, value) == torch.result_type(own, number):
        return None
    if own.dtype in INTEGERS:
        limits = torch.iinfo(own.dtype)
        return number if limits.min <= number <= limits.max else None
    if own.dtype in HALVES and at.root.target in PRODUCTS and value.numel() > 1 and not _holds(own.dtype, number):
        return None  # see `rounds_by_place`
    return number if own.is_floating_point() else None


def rounds_by_place(at: Site, operand: fx.Node) -> bool:
    """Whether an operand of the root is rounded to its dtype or not depending on where it stands.

    In half precision, kernels multiply and divide by a single number on the right as it is. They round one on the left,
    and all elements of a larger tensor.
    """
    dtype = at.root.meta["val"].dtype
    if dtype not in HALVES or at.root.target not in PRODUCTS:
        return False
    own, value = operand.meta["val"], at.value(operand)
    if own.dtype == dtype or own.numel() != 1:
        return False
    return value is None or value.device.type != "cpu" or not _holds(dtype, value.item())


def _holds(dtype: torch.dtype, number: Any) -> bool:
    return bool(torch.tensor(number, dtype=torch.float64, device="cpu").to(dtype).item() == number)


def number_in(value: torch.Tensor) -> int | float | None:
    """The finite real number that all elements of a constant are, by its bits; None where they differ."""
    if not value.numel() or not (value.is_floating_point() or value.dtype in INTEGERS):
        return None
    first, last = value[(0,) * value.dim()], value[(-1,) * value.dim()]  # looked at before all the others
    if not bool(first.isfinite()) or bool(first != last):
        return None
    same = (value == first) & (value.signbit() == first.signbit())
    return first.item() if bool(same.all()) else None


def _pair(op: Any) -> Any:
    return lambda a, b: op(a, b)


def _is_scalar(at: Site, constant: object) -> bool:
    value = at.value(constant)
    return value is not None and not value.dim()


@rule(*map(_pair, LITERAL_FORMS))
def literal_operand(at, x, constant):
    """x * w -> x * 2.0, x > w -> x > 2.0, w a 0-d constant that does not change the dtype"""
    literal = literal_of(at, x, constant) if _is_scalar(at, constant) else None
    return None if literal is None else at.call(LITERAL_FORMS[at.root.target], x, literal)


@rule(lambda constant, x: aten.sub.Tensor(constant, x))
def literal_minus(at, constant, x):
    """w - x -> rsub(x, 2.0), w a 0-d constant that does not change the dtype"""
    literal = literal_of(at, x, constant) if _is_scalar(at, constant) else None
    return None if literal is None else at.call(aten.rsub.Scalar, x, literal)


@rule(lambda x, mask, constant: aten.masked_fill.Tensor(x, mask, constant))
def literal_fill(at, x, mask, constant):
    """masked_fill(x, mask, w) -> masked_fill(x, mask, 2.0), w a 0-d constant, which the op reads as a number"""
    value = at.value(constant)
    if value is None or value.device.type != "cpu" or not (value.is_floating_point() or value.dtype in INTEGERS):
        return None
    return at.call(aten.masked_fill.Scalar, x, mask, value.item())


@rule(lambda constant, x: aten.add.Tensor(constant, x), lambda constant, x: aten.mul.Tensor(constant, x))
def constant_right(at, constant, x):
    """w + x -> x + w, w * x -> x * w, w a constant"""
    if at.value(constant) is None or not at.is_tensor(x) or at.value(x) is not None:
        return None
    if rounds_by_place(at, constant) or rounds_by_place(at, x):
        return at.skip(SIDES)
    return at.call(at.root.target, x, constant)


# NOTE: not among the forms: formulas with a weight are known by a weight, and fresh weights are all ones.
@rule(*map(_pair, LITERAL_FORMS))
def uniform_operand(at, x, constant):
    """x * w -> x * 2.0, x > w -> x > 2.0, w a constant tensor whose elements are all 2.0"""
    literal = literal_of(at, x, constant)
    return None if literal is None else at.call(LITERAL_FORMS[at.root.target], x, literal)


@rule(lambda constant, x: aten.sub.Tensor(constant, x))
def uniform_minus(at, constant, x):
    """w - x -> rsub(x, 2.0), w a constant tensor whose elements are all 2.0"""
    literal = literal_of(at, x, constant)
    return None if literal is None else at.call(aten.rsub.Scalar, x, literal)


# ---- masks --------------------------------------------------------------------------------------------------


@rule(
    lambda x, mask, value: aten.masked_fill.Scalar(x, mask, value),
    lambda x, mask, value: aten.masked_fill.Tensor(x, mask, value),
)
def fill_nothing(at, x, mask, value):
    """masked_fill(x, mask, v) -> x, mask a constant that is all False"""
    known = at.value(mask)
    if known is None or bool(known.any()):
        return None
    return x if at.same_type(x) else at.skip(PROMOTES)


@rule(
    lambda condition, yes, no: aten.where.self(condition, yes, no),
    lambda condition, yes, no: aten.where.ScalarOther(condition, yes, no),
    lambda condition, yes, no: aten.where.ScalarSelf(condition, yes, no),
)
def where_decided(at, condition, yes, no):
    """where(c, x, y) -> x, c a constant that is all True; -> y where it is all False"""
    known = at.value(condition)
    if known is None or (bool(known.any()) and not bool(known.all())):
        return None
    chosen = yes if bool(known.all()) else no
    return chosen if at.same_type(chosen) else at.skip(PROMOTES)


# ---- two of them --------------------------------------------------------------------------------------------


@rule(lambda x, w: aten.pow.Tensor_Tensor(x, w), numerics=Numerics.ROUNDING)
def literal_power(at, x, w):
    """x ** w -> x ** 3.0, w a constant with one value; the kernel for a literal multiplies instead of calling pow"""
    literal = literal_of(at, x, w)
    # NOTE: a root by the power 0.5 differs from pow at -inf; a large exponent may be refused as a literal.
    if literal is None or abs(literal) == 0.5 or abs(literal) > 64:
        return None
    return at.call(aten.pow.Tensor_Scalar, x, literal) if x.meta["val"].is_floating_point() else None


def _nested(outer: Any, inner: Any) -> Callable[..., Any]:
    return lambda x, a, b: outer(inner(x, a), b)


@rule(*(_nested(outer, inner) for outer in PRODUCTS for inner in PRODUCTS), numerics=Numerics.ROUNDING)
def mul_mul(at, x, a, b):
    """x * a * b -> x * (a * b), a and b literals or constants; x / a counts as x * (1 / a)"""
    first, second = wide(at, a), wide(at, b)
    if first is None or second is None:
        return None
    if not at.same_type(x):
        return at.skip(PROMOTES)
    dtype = x.meta["val"].dtype
    if dtype in INTEGERS:  # products modulo 2**n: exact
        return merged(at, aten.mul.Tensor, x, first * second, a, b)
    divides = [call.target is aten.div.Tensor for call in (at.root.args[0], at.root)]
    powers = [is_power_of_two(factor) for factor in (first, second)]
    if not _is_exact(powers, divides) and is_cut(at.program, at.root):
        return at.skip(CUT)
    first, second = (
        1 / factor if is_divisor else factor for factor, is_divisor in zip((first, second), divides, strict=True)
    )
    product, limits = first * second, torch.finfo(dtype)
    if not product_is_normal(product, first, second, dtype):
        return at.skip(OUT_OF_RANGE)
    # Where x * a overflows, so does the whole, unless b is below 1; and a modest a overflows no ordinary x.
    if bool((second.abs() < 1).any()) and bool((first.abs() > limits.max**0.125).any()):
        return at.skip(OVERFLOWS)
    return merged(at, aten.mul.Tensor, x, product, a, b)


def _is_exact(powers: Sequence[bool], divides: Sequence[bool]) -> bool:
    """Whether one factor is the same as two to the last bit: one of them, and each divisor, is a power of two."""
    return any(powers) and all(is_power for is_power, is_divisor in zip(powers, divides, strict=True) if is_divisor)


@rule(*(_nested(outer, inner) for outer in SUMS for inner in SUMS), numerics=Numerics.ROUNDING)
def add_add(at, x, a, b):
    """x + a + b -> x + (a + b), a and b literals or constants; x - a counts as x + -a"""
    first, second = wide(at, a), wide(at, b)
    if first is None or second is None:
        return None
    if not at.same_type(x):
        return at.skip(PROMOTES)
    dtype = x.meta["val"].dtype
    if absorbs(first, dtype) or absorbs(second, dtype):
        return at.skip(ABSORBS)
    if dtype.is_floating_point and is_cut(at.program, at.root):
        return at.skip(CUT)
    first = -first if at.root.args[0].target is aten.sub.Tensor else first
    total = first - second if at.root.target is aten.sub.Tensor else first + second
    return merged(at, aten.add.Tensor, x, total, a, b)


def product_is_normal(product: torch.Tensor, first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether the product of two factors, in float64, is a normal number of a dtype, or 0 because one of them is."""
    limits = torch.finfo(dtype)
    is_normal = (product.abs() >= limits.smallest_normal) & (product.abs() <= limits.max)
    is_zero = (product == 0) & ((first == 0) | (second == 0))
    return bool((is_normal | is_zero).all())


def wide(at: Site, operand: object) -> torch.Tensor | None:
    """A literal, or a constant of the root's own dtype and of modest size, as float64 or int64."""
    dtype = at.root.meta["val"].dtype
    kind = torch.float64 if dtype.is_floating_point else torch.int64
    if dtype not in INTEGERS and not dtype.is_floating_point:
        return None
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        return torch.tensor(operand, dtype=kind, device="cpu")
    value = at.value(operand)
    if value is None or value.dtype != dtype or not 0 < value.numel() <= LARGEST:
        return None
    return value.to(kind)


def merged(at: Site, op: Any, x: fx.Node, value: torch.Tensor, a: object, b: object) -> fx.Node | None:
    """`op(x, value)`: a literal where it is one number, else a constant in the dtype of x."""
    dtype = x.meta["val"].dtype
    if value.dim() == 0:
        return at.call(op, x, value.item() if dtype.is_floating_point else value.to(dtype).item())
    constants = [c for c in (a, b) if isinstance(c, fx.Node)]
    if value.numel() > max(c.meta["val"].numel() for c in constants):
        return None  # a row and a column: the constant would be a table
    return at.call(op, x, at.constant(value.to(dtype), f"{constants[0].target}.folded"))


FORMS = (literal_operand, literal_minus, literal_fill, constant_right)

# Folding creates constants after canonicalization: the same rules once more, under separate names.
literal_fill_again = replace(literal_fill, name="literal_fill_again")
constant_right_again = replace(constant_right, name="constant_right_again")

RULES = (
    uniform_operand,
    uniform_minus,
    literal_fill_again,
    constant_right_again,
    fill_nothing,
    where_decided,
    literal_power,
    mul_mul,
    add_add,
)
