"""Common ops, in every dtype and by every engine, at the ends of the dtype: right, or refused by name."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tsopt.compiler.calls.structure import flatten

pytestmark = pytest.mark.filterwarnings("ignore")
ENGINES = ["onnxruntime", *(["openvino"] if importlib.util.find_spec("openvino") else [])]
SLICE = 2  # ops of each dtype and engine in `make test`; all in `make fuzz`
SHAPE = (5, 33)  # kernels compute rows of 32 otherwise than what is left
CALLS = 4
Op = Callable[..., torch.Tensor]

ENDS = {
    torch.int64: (
        *(0, 1, -1, 3, 7, -7, 255, 2**24 + 1, 2**31, -(2**31) - 1, 2**31 - 1, -(2**31), 2**32, 2**32 + 5),
        *(2**40, -(2**40), 2**53 + 1, 1_700_000_000_123, 2**63 - 1, -(2**63)),
    ),
    torch.int32: (
        *(0, 1, -1, 3, 7, -7, 100, -100, 255, 256, 46341, 65536, 2**24 + 1, -(2**24) - 1),
        *(2**31 - 1, -(2**31)),
    ),
    torch.int16: (0, 1, -1, 7, -7, 100, 181, 182, 255, 256, -300, 32767, -32768),
    torch.int8: (0, 1, -1, 7, -7, 12, 64, 100, -100, 127, -128),
    torch.uint8: (0, 1, 7, 16, 100, 127, 128, 200, 254, 255),
    torch.float64: (
        *(0.0, -0.0, 0.1, 0.5, 1.0, -1.5, -2.5, 3.5, 255.5, 1 + 2.0**-40, 16777217.0),
        *(1.7e9 + 0.25, 3e9, -3e9, 1.7e12 + 0.5, 2.0**53, 1e-300, 1e39, -1e39, 1e300),
    ),
    torch.float32: (0.0, -0.0, 0.1, 1.0, -1.5, 2.5, -2.5, 3.5, 255.5, 65504.0, 16777218.0, 3e9, -3e9, 1e12, 1e-30),
    torch.float16: (0.0, -0.0, 0.1, 1.0, -1.5, -2.5, 3.5, 100.0, 255.5, 2047.5, 2049.0, 65504.0, -65504.0, 1e-7),
    torch.bool: (True, False),
}
TOLERANCE = {torch.float64: 1e-10, torch.float16: 4e-3}  # relative and absolute; 1e-4 for float32


def zeros(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.long)


SIGNS: dict[str, Op] = {
    "abs": abs,
    "neg": lambda x: -x,
    "sign": torch.sign,
    "signbit": torch.signbit,
    "copysign": lambda x: torch.copysign(x, -x),
    "heaviside": lambda x: torch.heaviside(x, x * 0),
}
ARITHMETIC: dict[str, Op] = {
    "x * x": lambda x: x * x,
    "x * 3": lambda x: x * 3,
    "x + 100": lambda x: x + 100,
    "100 - x": lambda x: 100 - x,
    "x + 0.5": lambda x: x + 0.5,
    "x * 0.5": lambda x: x * 0.5,
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x - x.flip": lambda x: x - x.flip(0),
    "x // 7": lambda x: x // 7,
    "x // -7": lambda x: x // -7,
    "x % 7": lambda x: x % 7,
    "x % -7": lambda x: x % -7,
    "x / 3": lambda x: x / 3,
    "fmod": lambda x: torch.fmod(x, 7),
    "trunc div": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "floor div": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "hash": lambda x: (x * 31 + 17) % 1000,
    "reciprocal": torch.reciprocal,
    "rsqrt": lambda x: x.abs().rsqrt(),
    "hypot": lambda x: torch.hypot(x, x),
    "addcmul": lambda x: torch.addcmul(x, x, x),
    "lerp to twice": lambda x: x.lerp(x * 2, 0.5),
    "lerp to a tenth": lambda x: x.lerp(x * 0, 0.9),
    "x + x / 10": lambda x: torch.add(x, x, alpha=0.1),
    "x - y / 10": lambda x, y: torch.sub(x, y, alpha=0.1),
    "deg2rad": torch.deg2rad,
    "rad2deg": torch.rad2deg,
    "log10": lambda x: x.abs().log10(),
    "x + y": lambda x, y: x + y,
    "x - y": lambda x, y: x - y,
    "x * y": lambda x, y: x * y,
    "x // positive": lambda x, y: x // (y.abs() % 5 + 1),
    "x % positive": lambda x, y: x % (y.abs() % 5 + 1),
    "fmod y": lambda x, y: torch.fmod(x, y.abs() % 5 + 1),
    "x / three": lambda x, y: x / (y * 0 + 3),
    "x ** (y & 1)": lambda x, y: x ** (y & 1),
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "gcd": torch.gcd,
    "float + y": lambda x, y: x.float() + y,
    "outer": lambda x, y: torch.outer(x[0], y[0]),
    "matmul": lambda x, y: x @ y.t(),
    "bmm": lambda x, y: torch.bmm(x[None], y.t()[None]),
}
ROUNDING: dict[str, Op] = {
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "frac": torch.frac,
    "nan_to_num": torch.nan_to_num,
}
LIMITS: dict[str, Op] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "leaky_relu": F.leaky_relu,
    "elu": lambda x: F.elu(x, 0.1),
    "celu": lambda x: F.celu(x, 0.1),
    "threshold": lambda x: F.threshold(x, 1, 0),
    "clamp": lambda x: x.clamp(-3, 100),
    "clamp to fractions": lambda x: x.clamp(-0.3, 0.1),
    "clamp min": lambda x: x.clamp(min=0),
    "maximum of 5": lambda x: torch.maximum(x, torch.tensor(5, dtype=x.dtype)),
    "minimum of 5": lambda x: torch.minimum(x, torch.tensor(5, dtype=x.dtype)),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "maximum of a column": lambda x, y: torch.maximum(x, y[:, :1]),
    "minimum of a row": lambda x, y: torch.minimum(x[:1], y),
    "clamp min y": lambda x, y: x.clamp(min=y),
    "clamp max y": lambda x, y: x.clamp(max=y),
}
REDUCTIONS: dict[str, Op] = {
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max of rows": lambda x: x.max(-1),
    "min of columns": lambda x: x.min(0),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(0),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "prod": lambda x: x[:, :3].prod(-1),
    "any": lambda x: x.any(-1),
    "all": lambda x: x.all(-1),
    "count_nonzero": lambda x: x.count_nonzero(-1),
    "median": lambda x: x.median(-1)[0],
    "kthvalue": lambda x: x.kthvalue(2, -1)[0],
    "cumsum": lambda x: x.cumsum(-1),
    "cummax": lambda x: x.cummax(-1)[0],
    "diff": lambda x: x.diff(dim=-1),
    "unfold, sum": lambda x: x.unfold(1, 3, 2).sum(-1),
    "distance": lambda x, y: (x - y).abs().sum(-1),
    "dot": lambda x, y: (x * y).sum(),
}
ORDER: dict[str, Op] = {
    "sort": lambda x: x.sort(-1)[0],
    "sort descending": lambda x: x.sort(0, descending=True)[0],
    "msort": torch.msort,
    "topk": lambda x: x.topk(3, -1)[0],
    "bucketize": lambda x: torch.bucketize(x, torch.tensor([0, 10, 1000])),
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([0.0, 10, 1000]), x.float()),
}
COMPARISONS: dict[str, Op] = {
    "x != 0": lambda x: x != 0,
    "x < 3": lambda x: x < 3,
    "x >= 7": lambda x: x >= 7,
    "x == 7": lambda x: x == 7,
    "isin": lambda x: torch.isin(x, torch.tensor([1, 7])),
    "isnan": torch.isnan,
    "isinf": torch.isinf,
    "isposinf": torch.isposinf,
    "isneginf": torch.isneginf,
    "x == y": lambda x, y: x == y,
    "x != y": lambda x, y: x != y,
    "x < y": lambda x, y: x < y,
    "x <= y": lambda x, y: x <= y,
    "x > y": lambda x, y: x > y,
    "x >= y": lambda x, y: x >= y,
    "isclose": torch.isclose,
    "where": lambda x, y: torch.where(x > y, x, y),
    "where of a number": lambda x: torch.where(x > 0, x, 7),
    "masked_fill": lambda x: x.masked_fill(x > 1, 5),
    "masked_fill by a fraction": lambda x: x.masked_fill(x > 1, 0.1),
}
LOGIC: dict[str, Op] = {
    "~x": lambda x: ~x,
    "x & 6": lambda x: x & 6,
    "x | 8": lambda x: x | 8,
    "x ^ 5": lambda x: x ^ 5,
    "x << 1": lambda x: x << 1,
    "x >> 1": lambda x: x >> 1,
    "logical_not": torch.logical_not,
    "x & y": lambda x, y: x & y,
    "x | y": lambda x, y: x | y,
    "x ^ y": lambda x, y: x ^ y,
    "x << y": lambda x, y: x << (y & 3),
    "x >> y": lambda x, y: x >> (y & 3),
    "logical_and": torch.logical_and,
    "logical_xor": torch.logical_xor,
}
CASTS: dict[str, Op] = {  # only of integers: C++ leaves open what a float becomes that no integer holds
    str(dtype).removeprefix("torch."): lambda x, dtype=dtype: x.to(dtype) for dtype in ENDS
}
DATA_MOVEMENT: dict[str, Op] = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(3, 1),
    "tril": torch.tril,
    "cat": lambda x: torch.cat([x, x]),
    "cat of two dtypes": lambda x, y: torch.cat([x, y.to(torch.int64)]),
    "stack": lambda x: torch.stack([x, x + 1]),
    "gather": lambda x: x.gather(1, zeros(x)[:, :2]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(1, zeros(x), x),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    "scatter_reduce": lambda x: x.scatter_reduce(1, zeros(x), x, "amax"),
    "one_hot": lambda x: F.one_hot((x % 4).long(), 4),
    "index": lambda x: torch.arange(9)[(x % 9).long()],
    "max_pool": lambda x: F.max_pool1d(x[None].float(), 2),
}
# The order of the terms is free, and rounding relative to them, not to what is left of them.
SUMS = ("sum", "sum of rows", "unfold, sum", "cumsum", "dot", "distance", "matmul", "bmm", "scatter_add", "index_add")
OPS = SIGNS | ARITHMETIC | ROUNDING | LIMITS | REDUCTIONS | ORDER | COMPARISONS | LOGIC | DATA_MOVEMENT
OF_WHOLE = OPS | CASTS


class One(nn.Module):
    def __init__(self, op: Op):
        super().__init__()
        self.op = op

    def forward(self, *values):
        return self.op(*values)


def drawn(dtype: torch.dtype, draw: random.Random) -> torch.Tensor:
    return torch.tensor(draw.choices(ENDS[dtype], k=SHAPE[0] * SHAPE[1]), dtype=dtype).reshape(SHAPE)


def small(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.bool else (x % 3).to(x.dtype)


def same(found: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor) -> bool:
    """Whether two results are equal, floats within rounding.

    Args:
        size: what rounding is relative to: the result itself, or the sum of the absolute values of all terms.
    """
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(found, wanted)
    near = TOLERANCE.get(wanted.dtype, 1e-4)
    close = (found.double() - wanted.double()).abs() <= near + near * size.double().abs()
    return bool((close | ~wanted.isfinite()).all())  # infinities are the business of the special inputs


OF_TWO = (torch.gcd, torch.maximum, torch.minimum, torch.fmax, torch.fmin)
OF_TWO += (torch.isclose, torch.logical_and, torch.logical_xor)


def arity(op: Op) -> int:
    return 2 if op in OF_TWO or "y" in getattr(getattr(op, "__code__", None), "co_varnames", ()) else 1


def eager_takes(op: Op, *calls: list[torch.Tensor]) -> bool:
    try:
        for call in calls:
            op(*call)
    except Exception:  # not an op of this dtype
        return False
    return True


def differences(name: str, op: Op, dtype: torch.dtype, engine: str) -> Iterator[str]:
    """What an engine makes of the ends of a dtype otherwise than eager, unless it has refused the model or the call."""
    draw = random.Random(f"{name} {dtype}")
    calls = [[drawn(dtype, draw) for _ in range(arity(op))] for _ in range(CALLS)]
    example = [small(x) for x in calls[0]]
    if not eager_takes(op, example, *calls):
        return
    try:
        program = tsopt.transform(tsopt.capture(One(op).eval(), tsopt.example(*example)))
        executable = tsopt.compile(program, engine)
    except tsopt.TsoptError:
        return
    for call in calls:
        wanted, _ = flatten(op(*call))
        try:
            found, _ = flatten(executable(*call))
        except tsopt.TsoptError:
            continue
        sizes, _ = flatten(op(*map(torch.abs, call))) if name in SUMS and dtype.is_floating_point else (wanted, None)
        if not all(map(same, found, wanted, sizes)):
            yield f"{name} of {dtype} by {engine}"
            return


@pytest.mark.sliced(4)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ENDS, ids=str)
def test_no_op_is_wrong_in_silence_at_the_ends_of_a_dtype(dtype, engine):
    ops = OPS if dtype.is_floating_point or dtype == torch.bool else OF_WHOLE
    names = list(ops)
    if not os.environ.get("TSOPT_FUZZ"):
        names = random.Random(f"{dtype} {engine}").sample(names, SLICE)
    assert [text for name in names for text in differences(name, ops[name], dtype, engine)] == []
