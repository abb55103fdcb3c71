"""Rules of interval arithmetic: the range of the result of an op, by the ranges of its arguments.

A rule returns the mathematical result, before it wraps around in its dtype: `int8 + int8` goes up to 254. Nothing is
known about the result of an op without a rule: it may wrap around.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tsopt.compiler.analysis.intervals import FLAG, Range, of_dtype
from tsopt.compiler.analysis.ranged_call import RangedCall

STEPS = 4  # by how many units in the last place a kernel's result is off, where it is not the nearest number
Rule = Callable[[RangedCall], Range | None]
ROUNDINGS: dict[str, Callable[[float], int]] = {
    "floor": math.floor, "ceil": math.ceil, "round": round, "trunc": math.trunc,
}  # fmt: skip

# Values and where they were.
PLACES = frozenset({"sort", "topk", "max", "min", "mode", "median", "kthvalue", "cummax", "cummin"})
# Each value of the result is a value of the first argument.
SAME_VALUES = frozenset(
    {
        "view", "reshape", "permute", "transpose", "t", "expand",
        "slice", "select", "unsqueeze", "squeeze", "flatten", "unflatten",
        "contiguous", "clone", "alias", "detach", "flip", "roll",
        "gather", "index_select", "index", "repeat", "tile", "split",
        "chunk", "unbind", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk",
        "narrow", "unfold", "diagonal", "movedim", "swapaxes", "take",
        "take_along_dim", "masked_select", "expand_as", "view_as", "reshape_as", "unsafe_view",
        "amin", "amax", "as_strided", "repeat_interleave", "lift_fresh_copy", "detach_copy",
        "ravel", "broadcast_to",
    }
)  # fmt: skip


def _corners(function: Callable[[float, float], float], a: Range, b: Range) -> Range:
    """Of a function that is monotone in each argument."""
    found = [function(x, y) for x, y in itertools.product((a.low, a.high), (b.low, b.high))]
    found = [0.0 if math.isnan(value) else value for value in found]  # 0 * inf: nothing, any number of times
    return Range(min(found), max(found))


def _product(x: float, y: float) -> float:
    return 0 if x == 0 or y == 0 else x * y


def _scaled(call: RangedCall, name: str) -> Range:
    """An argument times alpha, a product that may be rounded before it is added."""
    found = _corners(_product, call.of(name), call.of(call.arguments.get("alpha", 1)))
    is_ours = call.value.dtype == torch.float64 and not _is_exact(call, found)  # Python has rounded the ends
    return call.rounded(found, 1 if is_ours else 0)


def _sum(a: Range, b: Range) -> Range:
    return Range(a.low + b.low, a.high + b.high)


def _add(call: RangedCall) -> Range:
    return _sum(call.of("self"), _scaled(call, "other"))


def _sub(call: RangedCall) -> Range:
    return _sum(call.of("self"), -_scaled(call, "other"))


def _rsub(call: RangedCall) -> Range:
    return _sum(call.of("other"), -_scaled(call, "self"))


def _quotient(call: RangedCall) -> Range | None:
    """By numbers of one sign. Some kernels multiply by the inverse of the divisor."""
    divisor = call.of("other")
    if divisor.low <= 0 <= divisor.high:
        return None
    if not call.is_float:
        found = _corners(operator.floordiv, call.of("self"), divisor)
        return Range(found.low, found.high + 1)  # cut towards zero, it may be one more
    is_exact = divisor.low == divisor.high and abs(math.frexp(divisor.low)[0]) == 0.5
    found = call.rounded(_corners(operator.truediv, call.of("self"), divisor), 0 if is_exact else STEPS)
    if call.name == "div" and call.arguments.get("rounding_mode") is None:
        return found
    return Range(_floor(found.low), _floor(found.high) + 1)


def _floor(value: float) -> float:
    return value if math.isinf(value) else math.floor(value)


def _remainder(call: RangedCall) -> Range | None:
    """Of the sign of the divisor, which floats reach: `-1e-9 % 1.0` is 1.0."""
    divisor = call.of("other")
    if call.is_float:
        return None if divisor.low <= 0 <= divisor.high else Range(min(0, divisor.low), max(0, divisor.high))
    return Range(min(0, divisor.low + 1), max(0, divisor.high - 1))


def _fmod(call: RangedCall) -> Range | None:
    """Of the sign of the dividend."""
    divisor, value = call.of("other"), call.of("self")
    if call.is_float and divisor.low <= 0 <= divisor.high:
        return None
    most = max(abs(divisor.low), abs(divisor.high)) - (0 if call.is_float else 1)
    return Range(max(-most, min(0, value.low)), min(most, max(0, value.high)))


def _absolute(found: Range) -> Range:
    low = 0 if found.low <= 0 <= found.high else min(abs(found.low), abs(found.high))
    return Range(low, max(abs(found.low), abs(found.high)))


def _is_exact(call: RangedCall, *ranges: Range) -> bool:
    """Whether the dtype of the result holds these ends and all whole numbers between them."""
    most = 2 / torch.finfo(call.value.dtype).eps if call.is_float else math.inf
    return all(end == _floor(end) and abs(end) <= most for found in ranges for end in (found.low, found.high))


def _reduced(call: RangedCall) -> Range | None:
    """A sum over axes: of as many values as there are along them. One of floats is rounded at each step."""
    if not call.is_float and call.reads_float("self"):
        return None  # which casts each value before it adds it
    count, value = call.size("self", call.arguments.get("dim")), call.of("self")
    value = value | Range(0, 0) if call.name == "cumsum" else value
    found = Range(_product(value.low, count), _product(value.high, count))
    if _is_exact(call, value, found):
        return found  # no partial sum is beyond a multiple of an end
    eps = torch.finfo(call.value.dtype).eps
    off = math.expm1(count * min(eps, torch.finfo(torch.float32).eps)) / eps
    return call.rounded(found, STEPS + count.bit_length() + math.ceil(off))


def _greater(call: RangedCall) -> Range:
    a, b = call.of("self"), call.of("other")
    return Range(max(a.low, b.low), max(a.high, b.high))


def _smaller(call: RangedCall) -> Range:
    a, b = call.of("self"), call.of("other")
    return Range(min(a.low, b.low), min(a.high, b.high))


def _scatter(call: RangedCall) -> Range | None:
    if "reduce" in call.arguments:
        return None
    return call.union([call.arguments["self"], call.arguments["src" if "src" in call.arguments else "value"]])


def to_whole(found: Range, way: Callable[[float], int]) -> Range:
    """A range of numbers that are made whole numbers this way."""
    return Range(*(end if math.isinf(end) else way(end) for end in (found.low, found.high)))


def _rounded(way: Callable[[float], int]) -> Rule:
    """To whole numbers; nothing is known with `decimals`."""
    return lambda call: None if call.arguments.get("decimals") else to_whole(call.of("self"), way)


def _cast(call: RangedCall, source: str = "self") -> Range:
    """The range after a cast: a float holds a large integer only approximately, and is cut to become one."""
    return call.of(source) if call.is_float else to_whole(call.of(source), math.trunc)


def _replaced(call: RangedCall) -> Range:
    """Without NaN, and without infinities unless they are asked for."""
    dtype = call.value.dtype
    most = Range(-torch.finfo(dtype).max, torch.finfo(dtype).max) if call.is_float else of_dtype(dtype)
    given = [call.arguments[name] for name in ("nan", "posinf", "neginf")]
    return call.of("self") & most | call.union([0, *(item for item in given if item is not None)])


def _clamp(call: RangedCall) -> Range:
    found = call.of("self")
    for name, end in (("min", max), ("max", min)):
        if call.arguments.get(name) is not None:
            limit = call.of(name)
            found = Range(end(found.low, limit.low), end(found.high, limit.high))
    return found


def _arange(call: RangedCall) -> Range:
    start, end, count = call.number("start", 0), call.number("end"), call.value.numel()
    if type(count) is int and not call.value.is_floating_point():  # the end itself is not reached
        end = start + max(0, count - 1) * call.number("step", 1)
        return Range(math.floor(min(start, end)), math.ceil(max(start, end)))
    return call.rounded(Range(min(start, end), max(start, end)), STEPS)


def _place(call: RangedCall) -> Range:
    return Range(0, max(0, call.size("self", call.arguments.get("dim")) - 1))


def _count(name: str) -> Rule:
    return lambda call: Range(0, call.size(name))


def _bits(call: RangedCall) -> Range | None:
    """No more bits than the larger one has; of numbers that are not negative, no sign."""
    a, b = call.of("self"), call.of("other")
    low, high = min(a.low, b.low), max(a.high, b.high)
    if math.isinf(low) or math.isinf(high):
        return None
    above = 1 << max(int(high).bit_length(), int(-low - 1).bit_length() if low < 0 else 0)
    return Range(-above if low < 0 else 0, above - 1)


def _power(call: RangedCall) -> Range | None:
    exponent, base = call.number("exponent"), call.of("self")
    if exponent != int(exponent) or exponent < 0 or max(abs(base.low), abs(base.high)) ** exponent > 1e300:
        return None
    found = _corners(operator.pow, base, Range(exponent, exponent))
    found = call.rounded(found, 0 if exponent <= 3 and _is_exact(call, base, found) else STEPS)
    return Range(min(0, found.low), found.high) if exponent % 2 == 0 else found


def _shift(call: RangedCall, left: bool) -> Range | None:
    by = call.of("other")
    if by.low < 0 or by.high > 63:
        return None
    return _corners(lambda x, n: int(x) << int(n) if left else int(x) >> int(n), call.of("self"), by)


def _logarithm(call: RangedCall) -> Range | None:
    found = call.of("self")
    return call.rounded(Range(math.log(found.low), math.log(found.high)), STEPS) if found.low > 0 else None


def _difference(call: RangedCall) -> Range:
    """Of each value and the one before it, as many times as the call says."""
    found = call.union([call.arguments[name] for name in ("self", "prepend", "append") if call.arguments.get(name)])
    for _ in range(int(call.number("n", 1))):
        found = call.rounded(Range(found.low - found.high, found.high - found.low))
    return found


def _within(*sources: str) -> Rule:
    """Values of several arguments."""
    return lambda call: call.union([call.arguments[name] for name in sources])


def _constant(name: str) -> Rule:
    return lambda call: call.of(name)


def _quantized(call: RangedCall) -> Range:
    """NaN becomes zero, which may not lie between the ends."""
    if call.arguments["input"] in call.doubtful:
        return of_dtype(call.value.dtype)
    return Range(call.number("quant_min"), call.number("quant_max"))


def _pooled(call: RangedCall) -> Range | None:
    return None if may_miss(call.arguments) else call.of("self")


def may_miss(arguments: Mapping[str, Any]) -> bool:
    """Whether a window of a maximum may hold nothing but padding, and the result be the lowest number."""
    padding, dilation = (max(tree_leaves(arguments[name])) for name in ("padding", "dilation"))
    return bool(padding > 0 and dilation > 1)


def _dropped(call: RangedCall) -> Range | None:
    """What is kept of it in training is scaled."""
    return None if call.arguments["train"] and call.arguments["p"] else call.of("input")


def _softmax(call: RangedCall) -> Range | None:
    """Between zero and one, unless a number becomes infinite in the dtype of the result: inf - inf is NaN."""
    dtype = call.values[call.arguments["self"]].dtype
    held = call.of("self")
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        held &= call.rounded(Range(-most, most))
    return FLAG if math.isfinite(held.low) and math.isfinite(held.high) else None


def _repeated(call: RangedCall) -> Range:
    """Values, or the places of the numbers that say how often."""
    return call.of("self") if "self" in call.arguments else Range(0, max(0, call.size("repeats") - 1))


def _padded(call: RangedCall) -> Range:
    return call.of("self") | Range(0, 0)


RULES: dict[str, Rule] = {
    **dict.fromkeys(SAME_VALUES, lambda call: call.of(next(iter(call.arguments)))),
    "max": lambda call: _greater(call) if "other" in call.arguments else call.of("self"),
    "min": lambda call: _smaller(call) if "other" in call.arguments else call.of("self"),
    **dict.fromkeys(("median", "mode", "kthvalue", "msort", "sort"), lambda call: call.of("self")),
    "copy": lambda call: _cast(call, "src"),
    "fill": _constant("value"),
    **dict.fromkeys(("to", "type_as", "to_copy"), _cast),
    **{name: _rounded(way) for name, way in ROUNDINGS.items()},
    "nan_to_num": _replaced,
    "repeat_interleave": _repeated,
    "embedding": _constant("weight"),
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": lambda call: _corners(_product, call.of("self"), call.of("other")),
    "div": _quotient,
    "floor_divide": _quotient,
    "remainder": _remainder,
    "fmod": _fmod,
    "neg": lambda call: -call.of("self"),
    "abs": lambda call: _absolute(call.of("self")),
    "sign": lambda call: Range(-1, 1),
    "sum": _reduced,
    "cumsum": _reduced,
    "diff": _difference,
    "count_nonzero": _count("self"),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "relu": lambda call: Range(max(0, call.of("self").low), max(0, call.of("self").high)),
    **dict.fromkeys(("maximum", "fmax"), _greater),
    **dict.fromkeys(("minimum", "fmin"), _smaller),
    **dict.fromkeys(("cat", "stack"), _constant("tensors")),
    "where": lambda call: call.union([call.arguments["self"], call.arguments["other"]]),
    "masked_fill": _within("self", "value"),
    "scatter": _scatter,
    "index_put": lambda call: None if call.arguments["accumulate"] else _within("self", "values")(call),
    "index_fill": _within("self", "value"),
    "index_copy": _within("self", "source"),
    "masked_scatter": _within("self", "source"),
    "slice_scatter": _within("self", "src"),
    "select_scatter": _within("self", "src"),
    **dict.fromkeys(("tril", "triu"), _padded),
    "constant_pad_nd": _within("self", "value"),
    "pad": lambda call: call.of("self") | call.of(call.arguments["value"] or 0),
    "arange": _arange,
    **dict.fromkeys(("full", "full_like", "new_full"), _constant("fill_value")),
    "scalar_tensor": _constant("s"),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "zero"), lambda call: Range(0, 0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones", "one"), lambda call: Range(1, 1)),
    **dict.fromkeys(("argmax", "argmin", "argsort"), _place),
    "one_hot": lambda call: FLAG,
    "isin": lambda call: FLAG,
    **dict.fromkeys(("quantize_per_tensor", "quantize_per_channel"), _quantized),
    "bucketize": _count("boundaries"),
    "searchsorted": _count("sorted_sequence"),
    "nonzero": lambda call: Range(0, max(call.values[call.arguments["self"]].shape, default=1)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "and", "or", "xor"), _bits),
    "bitwise_not": lambda call: Range(-call.of("self").high - 1, -call.of("self").low - 1),
    **dict.fromkeys(("bitwise_left_shift", "lshift"), lambda call: _shift(call, True)),
    **dict.fromkeys(("bitwise_right_shift", "rshift"), lambda call: _shift(call, False)),
    "pow": _power,
    "log": _logarithm,
    "sigmoid": lambda call: FLAG,
    "softmax": _softmax,
    **dict.fromkeys(("max_pool2d", "max_pool1d"), _pooled),
    "dropout": _dropped,
    "tanh": lambda call: Range(-1, 1),
}
