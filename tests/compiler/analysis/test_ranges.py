"""Intervals of whole numbers: what each rule says holds for what torch computes, and is no wider than it must be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # its ops
import torch.nn.functional as F

import tsopt
from tsopt.compiler.analysis.intervals import ANY, Range, of_dtype, range_of_tensor, rounded, wrapped
from tsopt.compiler.analysis.ranges import ranges_of, recorded

LOW, HIGH = -6, 9
X = torch.arange(LOW, HIGH + 1).reshape(4, 4)


def found(model, *inputs: Range, example=None) -> Range:
    """The range of the only output."""
    args = example or tuple(X.clone() for _ in inputs)
    program = tsopt.capture(model, args)
    (output,) = program.outputs
    return ranges_of(program, recorded(program), inputs)[output]


CASES = [
    (lambda x: x + 5, -1, 14),
    (lambda x: x - 5, -11, 4),
    (lambda x: torch.add(x, 2, alpha=3), 0, 15),
    (lambda x: 3 - x, -6, 9),
    (lambda x: x * -2, -18, 12),
    (lambda x: -x, -9, 6),
    (lambda x: abs(x), 0, 9),
    (lambda x: x // 4, -2, 3),
    (lambda x: x % 7, 0, 6),
    (lambda x: x % -7, -6, 0),
    (lambda x: torch.fmod(x, 4), -3, 3),
    (lambda x: x.clamp(-2, 3), -2, 3),
    (lambda x: x.clamp(min=0), 0, 9),
    (lambda x: x.relu(), 0, 9),
    (lambda x: x.sign(), -1, 1),
    (lambda x: x.sum(), -96, 144),
    (lambda x: x.sum(1), -24, 36),
    (lambda x: x.cumsum(0), -24, 36),
    (lambda x: x.amax(1), -6, 9),
    (lambda x: x.argmax(1), 0, 3),
    (lambda x: x.argmax(), 0, 15),
    (lambda x: x.max(1)[0], -6, 9),
    (lambda x: x.max(1)[1], 0, 3),
    (lambda x: x.sort(1)[1], 0, 3),
    (lambda x: torch.maximum(x, x.flip(0)), -6, 9),
    (lambda x: torch.where(x > 2, x, 100), -6, 100),
    (lambda x: x.masked_fill(x > 2, -50), -50, 9),
    (lambda x: torch.cat([x, x * 2]), -12, 18),
    (lambda x: ~x, -10, 5),
    (lambda x: x << 2, -24, 36),
    (lambda x: x >> 1, -3, 4),
    (lambda x: x.clamp(min=0) & 5, 0, 15),
    (lambda x: x**2, 0, 81),
    (lambda x: x > 3, 0, 1),
    (lambda x: x.diff(dim=1), -15, 15),
    (lambda x: x.diff(n=2, dim=0), -30, 30),
    (lambda x: x.diff(prepend=x[:, :1] * 2), -30, 30),
    (lambda x: torch.isin(x, x[:1]), 0, 1),
    (lambda x: torch.arange(3, 10, 3), 3, 9),
    (lambda x: torch.arange(4, -4, -3), -2, 4),
    (lambda x: torch.arange(0.5, 3, dtype=torch.int64), 0, 3),
    (lambda x: (x > 3).long().cumsum(1), 0, 4),
    (lambda x: x.t()[1:].reshape(-1), -6, 9),
    (lambda x: torch.zeros_like(x), 0, 0),
    (lambda x: torch.full_like(x, 7), 7, 7),
    (lambda x: x.float().long(), -6, 9),
    (lambda x: (x.float() / 4).floor().long(), -2, 2),
    (lambda x: (x.float() / 4).ceil().long(), -1, 3),
    (lambda x: (x.float() / 3).round().long(), -2, 3),
    (lambda x: (x.float() * 1.5).trunc().long(), -9, 13),
    (lambda x: (x.float() * 3 - 1).sum(1).long(), -76, 104),
    (lambda x: (x.half() + 0.5).cumsum(0).long(), -22, 38),
    (lambda x: x.clamp(1, 8).float().log().long(), 0, 2),
    (lambda x: torch.repeat_interleave(x.clamp(1, 1).flatten(), output_size=16), 0, 15),
    (lambda x: x.flatten().repeat_interleave(2), -6, 9),
    (lambda x: torch.nn.functional.one_hot(x.clamp(0, 3), 4), 0, 1),
    (lambda x: torch.scatter(x, 0, x.clamp(0, 3), 30), -6, 30),
    (lambda x: torch.nn.functional.pad(x, (1, 1), value=20), -6, 20),
    (lambda x: torch.full_like(x, 0.5) - 5, -5, -5),
    (lambda x: torch.full((3,), -0.5, dtype=torch.int64) - 5, -5, -5),
    (lambda x: x.new_full((3,), 1.9) * 10, 10, 10),
    (lambda x: torch.scalar_tensor(2.5, dtype=torch.int64) * 2, 4, 4),
    (lambda x: x.clamp(1, 1).masked_fill(x > 2, 0.5) * 10 - 8, -8, 2),
    (lambda x: x.clamp(1, 1).index_fill(1, torch.tensor([0]), 0.5) * 10 - 8, -8, 2),
    (lambda x: x.clamp(1, 1).scatter(0, x.clamp(0, 3), 0.5) * 10 - 8, -8, 2),
    (lambda x: torch.nn.functional.pad(x.clamp(1, 1), (1, 1), value=0.5) * 10 - 8, -8, 2),
    (lambda x: (x.clamp(0, 0) + (2**62 + 100)) // 1, 2**62 + 100, 2**62 + 100),
    (lambda x: torch.div(x, 4, rounding_mode="trunc"), -2, 3),
    (lambda x: (x.clamp(0, 0) + (2**62 + 100)) >> 1, 2**61 + 50, 2**61 + 50),
    (lambda x: x.float().softmax(0).long(), 0, 1),
]


@pytest.fixture(scope="module")
def all_found() -> list[Range]:
    """The ranges of all cases: they are one program, because capture takes longer than all that is asked of it."""
    program = tsopt.capture(lambda x: tuple(case[0](x) for case in CASES), (X,))
    ranges = ranges_of(program, recorded(program), [Range(LOW, HIGH)])
    leaves = [ranges[node] for node in program.outputs]
    assert len(leaves) == len(CASES)
    return leaves


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_range_holds_what_torch_computes_and_is_no_wider(number, all_found):
    (model, low, high), made = CASES[number], all_found[number]
    real = model(X)
    assert made.low <= int(real.min())
    assert int(real.max()) <= made.high
    assert low - 1 <= made.low <= low
    assert high <= made.high <= high + 1


@pytest.mark.parametrize(
    "model",
    [lambda x, y: x @ y, lambda x, y: x // y, lambda x, y: x.scatter_add(0, y.clamp(0, 3), x)],
)
def test_of_what_is_not_known_nothing_is_said(model):
    assert found(model, Range(0, 3), Range(0, 3), example=(X, X.abs() + 1)) == ANY


def test_bits_of_negative_numbers_are_as_many_as_of_the_larger_one():
    assert found(lambda x, y: x ^ -y, Range(0, 3), Range(0, 3), example=(X, X)) == Range(-4, 3)
    assert found(lambda x, y: x & y, Range(-9, 3), Range(0, 100), example=(X, X)) == Range(-128, 127)


def test_a_float_is_anything_unless_it_was_a_whole_number():
    assert found(lambda x: x.long(), ANY, example=(torch.ones(2),)) == ANY
    assert found(lambda x: x + 1, ANY, example=(torch.ones(2),)) == ANY


def test_a_float_beside_a_large_whole_number_is_within():
    made = found(lambda x: x.float().long(), Range(0, 2**31 - 1))
    assert made.high >= int(torch.tensor(2**31 - 1).float().long())


REALS = torch.tensor([-7.3, -1e-9, 0.0, 2.75, 88.9, 998.0, 1e6 + 0.5])
CUT = [
    (lambda x: (x % 1.0 * 10).long(), Range(0, 10)),
    (lambda x: (x % 1.0 * 2**32).long(), Range(0, 2**32)),
    (lambda x: (x % -2.5).long(), Range(-2, 0)),
    (lambda x: (torch.fmod(x, 1.0) * 10).long(), Range(-10, 10)),
    (lambda x: (x.sigmoid() * 9).long(), Range(0, 9)),
    (lambda x: (x.sigmoid() / 3 * 9).long(), Range(0, 3)),
    (lambda x: (x.sigmoid() * (2**31 - 1)).long(), Range(0, 2**31)),
    (lambda x: (x.bfloat16().sigmoid() * 1003).long(), Range(0, 1004)),
    (lambda x: torch.rsub(x.bfloat16().tanh(), 1, alpha=1001).long(), Range(-1004, 1008)),
    (lambda x: (x.half().sigmoid() * 60000 * 2).long(), Range(0, math.inf)),
    (lambda x: x.clamp(0, 999).round(decimals=-3).long(), ANY),
]


def test_the_range_of_a_float_holds_its_rounding():
    """`-1e-9 % 1.0` is 1.0, and 2**31 - 1 is 2**31."""
    program = tsopt.capture(lambda x: tuple(model(x) for model, _ in CUT), (REALS,))
    ranges = ranges_of(program, recorded(program), [ANY])
    for (model, expected), node in zip(CUT, program.outputs, strict=True):
        real = model(REALS)
        assert ranges[node] == expected, node
        assert Range(int(real.min()), int(real.max())) in wrapped(expected, torch.int64)


def test_two_products_or_a_product_and_a_sum_round_twice_or_once():
    x = torch.tensor([0.3], dtype=torch.float64)
    assert found(lambda x: x.clamp(0, 0.3) ** 3, ANY, example=(x,)).high >= float(x**3) > 0.3**3
    assert found(lambda x: torch.rsub(x.clamp(0, 0.3), 1, alpha=3), ANY, example=(x,)).low <= 0.10000000000000003
    assert found(lambda x: x.float() ** 3, Range(LOW, HIGH)) == Range(LOW**3, HIGH**3)


@pytest.mark.parametrize(
    "model",
    [
        lambda x, n: x.clamp(min=n),
        lambda x, n: torch.clamp(x, torch.tensor(n), torch.tensor(9)),
        lambda x, n: torch.maximum(x, torch.tensor(n)),
        lambda x, n: torch.where(x > 2, x, n),
        lambda x, n: torch.where(x > 2, x, torch.tensor(n)),
        lambda x, n: x.masked_fill(x > 2, n),
        lambda x, n: torch.full_like(x, n),
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: torch.constant_pad_nd(x, [1, 1], n),
        torch.add,
        torch.sub,
        torch.mul,
        torch.remainder,
        torch.fmod,
        torch.floor_divide,
        torch.bitwise_or,
    ],
)
@pytest.mark.parametrize(("dtype", "number"), [(torch.uint8, -5), (torch.uint8, -1), (torch.int8, -200)])
def test_a_literal_beyond_the_dtype_wraps_around(model, dtype, number):
    """-5 is 251 in uint8, so `(x % 10).clamp(min=-5)` is 251, which is not a valid index into ten rows."""
    x = torch.arange(10, dtype=dtype)
    made, refusal = None, ""
    try:
        made = model(x, number)
    except RuntimeError as error:
        refusal = str(error)
    if made is None:  # a negative number wraps around in every operation on unsigned integers
        assert dtype is torch.int8
        assert "without overflow" in refusal
        return
    known = wrapped(found(lambda x: model(x, number), Range(0, 9), example=(x,)), dtype)
    assert Range(int(made.min()), int(made.max())) in known


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [0, 1, -3, 0.1, -0.1, 257, 2049, 2**24 + 1, 2**53 + 1, 70_000, -1e39, 1e-320])
def test_a_range_is_rounded_outwards_unless_the_dtype_holds_its_ends(number, dtype):
    held = torch.tensor(float(number), dtype=torch.float64).to(dtype).item()
    made = rounded(Range(number, number), dtype)
    assert Range(held, held) in made
    assert Range(number, number) in made
    if held == number and abs(number) != 1e-320:
        assert made == Range(number, number)
    assert made in rounded(Range(number, number), dtype, steps=2)


def test_a_sum_of_floats_is_wider_than_its_terms_unless_each_step_is_exact():
    """A tenth, added up in float32 one by one, is more than its multiple."""
    steps = torch.full((4096,), 0.1).cumsum(0)
    sums = lambda x: ((x > 0).float().cumsum(0), ((x > 0).float() * 0.1).cumsum(0))  # noqa: E731
    program = tsopt.capture(sums, (torch.ones(4096),))
    ranges = ranges_of(program, recorded(program), [ANY])
    whole, tenths = (ranges[node] for node in program.outputs)
    assert whole == Range(0, 4096)
    assert float(steps[-1]) <= tenths.high <= 410.5


QUANTIZE = torch.ops.quantized_decomposed.quantize_per_tensor.default
NAN = [
    (lambda x, n: (x.sigmoid() * 9).long(), False),
    (lambda x, n: x.clamp(0, 9).to(torch.int32), False),
    (lambda x, n: x.clamp(0, 1).max(0, keepdim=True)[0].long(), False),
    (lambda x, n: torch.where(n > 1, 0.5, math.nan).long(), False),
    (lambda x, n: (n.float() * math.inf).clamp(0, 1).long(), False),
    (lambda x, n: (n.float() % (n > 1).float()).clamp(0, 1).long(), False),
    (lambda x, n: x.clamp(0, 1).sum(0, dtype=torch.int64), False),
    (lambda x, n: x.long().clamp(0, 9), True),
    (lambda x, n: x.softmax(0).argmax(0), True),
    (lambda x, n: (x.sigmoid().nan_to_num() * 9).long(), True),
    (lambda x, n: (x.nan_to_num(5.0).sigmoid() * 9).long(), True),
    (lambda x, n: (n.float().sigmoid() * 9).long(), True),
    (lambda x, n: (n.clamp(0, 9).float() / 3).long(), True),
    (lambda x, n: (x > 0).float().long(), True),
    (lambda x, n: torch.softmax(n.clamp(0, 1).float() * 1e5, 0, dtype=torch.float16).long(), False),
    (lambda x, n: torch.softmax(n.clamp(0, 9).float(), 0, dtype=torch.float16).long(), True),
    (lambda x, n: torch.softmax(x.nan_to_num(), 0).long(), True),
    (lambda x, n: x.sigmoid().nan_to_num().view(torch.int32) * 1, False),
    (lambda x, n: n.clamp(0, 9).view(torch.float64).nan_to_num(0.0, 0.0, 0.0).view(torch.int64), False),
    (lambda x, n: torch.zeros_like(x).long(), True),
    (lambda x, n: torch.ones_like(x).cumsum(-1).long(), True),
    (lambda x, n: torch.full_like(x, 2.0).long() + x.new_full((2,), 3.0).long() + x.new_zeros(2).long(), True),
    (lambda x, n: torch.full_like(x, math.nan).long(), False),
    (lambda x, n: n.clamp(0, 1)[:1].expand_as(x).float().long(), True),
    (lambda x, n: n.clamp(0, 1).type_as(x).long(), True),
    (lambda x, n: F.max_pool1d(n.clamp(0, 9).float()[None], 2, 1, 1, 2).long(), False),
    (lambda x, n: F.max_pool1d(n.clamp(0, 9).float()[None], 2, 1, 1).long(), True),
    (lambda x, n: F.dropout(n.clamp(0, 9).float(), 0.9, True).long(), False),
    (lambda x, n: n.clamp(0, 9).float().sum(0, dtype=torch.int64), False),
    (lambda x, n: (n.clamp(0, 9) * 0.5).to(torch.complex64).abs().long(), False),
    (lambda x, n: QUANTIZE(x, 1.0, 3, 2, 9, torch.uint8), False),
    (lambda x, n: QUANTIZE(x.nan_to_num(), 1.0, 3, 2, 9, torch.uint8), True),
]


def test_where_nan_is_taken_into_account_a_float_becomes_any_number():
    """It becomes the lowest of int64, which is not a valid index."""
    args = (torch.tensor([math.nan, 1.0]), torch.tensor([1, 2]))
    program = tsopt.capture(lambda x, n: tuple(model(x, n) for model, _ in NAN), args)
    inputs = [ANY, of_dtype(torch.int64)]
    found = ranges_of(program, recorded(program), inputs, with_nan=True)
    assert [found[node] in Range(0, 9) for node in program.outputs] == [known for _, known in NAN]
    others = ranges_of(program, recorded(program), inputs)
    assert others[program.outputs[0]] == others[program.outputs[1]] == Range(0, 9)


def test_overflow_is_seen_and_what_follows_may_be_anything():
    assert found(lambda x: x + x, Range(0, 200), example=(X.to(torch.uint8),)).high == 400
    assert found(lambda x: (x + x) + 0, Range(0, 200), example=(X.to(torch.uint8),)) == of_dtype(torch.uint8)


def test_a_weight_has_the_range_of_its_values():
    assert range_of_tensor(torch.tensor([3, -4])) == Range(-4, 3)
    assert range_of_tensor(torch.tensor(2.5)) == Range(2.5, 2.5)
    assert range_of_tensor(torch.ones(0, dtype=torch.int8)) == Range(-128, 127)
    assert range_of_tensor(torch.tensor(math.nan)) == ANY


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn], ids=str)
def test_a_weight_has_a_range_in_dtypes_with_few_kernels(dtype):
    assert range_of_tensor(torch.tensor(1.0).to(dtype)) == Range(1, 1)
    several = range_of_tensor(torch.tensor([0.0, 1.0]).to(dtype))
    assert several == (ANY if dtype.is_floating_point else Range(0, 1))


def test_the_largest_number_of_64_bits_without_a_sign_is_seen():
    assert range_of_tensor(torch.tensor([3, -1]).view(torch.uint64)) == Range(3, 2**64 - 1)
