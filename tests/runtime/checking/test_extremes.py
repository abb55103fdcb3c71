"""The ends of dtypes as inputs: of one input at a time, only where no value decides how much is computed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.extremes import EXTREME, numbers_of
from tsopt.runtime.checking.inputs import input_sets

pytestmark = pytest.mark.filterwarnings("ignore")
INTS, FLOATS = torch.arange(64).reshape(8, 8), torch.linspace(-2, 2, 64)


def extremes(model, *args):
    sets = input_sets(tsopt.example(*args), 0, tsopt.capture(model, args))
    return {item.kind: item.example.args for item in sets if item.kind.startswith(EXTREME)}


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (torch.int64, {2**63 - 1, -(2**63), 2**31, 2**31 - 1, -(2**31) - 1, 2**53 + 1, 1_700_000_000, 255, -128, 128}),
        (torch.int32, {2**31 - 1, -(2**31), 1_700_000_000, 2**24 + 1}),
        (torch.int16, {32_767, -32_768, 255}),
        (torch.uint8, {0, 255, 128, 127}),
        (torch.int8, {127, -128, -1}),
        (torch.float64, {2.0**53, 3e9, 1.7e9 + 0.25}),
        (torch.float16, {65_504.0, 2047.0}),
    ],
)
def test_the_ends_of_each_dtype_are_tried(dtype, wanted):
    assert wanted <= set(numbers_of(dtype))
    (value,) = next(iter(extremes(lambda x: x + 1, torch.ones(64).to(dtype)).values()))
    assert wanted <= set(value.tolist())
    assert value.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.uint16])
def test_of_other_dtypes_nothing_is_tried(dtype):
    assert numbers_of(dtype) == ()


def test_one_input_at_a_time_and_all_together():
    found = extremes(lambda x, y, z: x + y * z, INTS, INTS.int(), FLOATS.reshape(8, 8))
    assert list(found) == [f"{EXTREME} x", f"{EXTREME} y", EXTREME]
    assert torch.equal(found[f"{EXTREME} x"][1], INTS.int())
    assert not torch.equal(found[EXTREME][1], INTS.int())


def test_a_small_input_is_tried_several_times_with_other_numbers():
    found = extremes(lambda x: x + 1, torch.tensor([5]))
    assert len({value.item() for (value,) in found.values()}) == 3


def test_floats_of_32_bits_are_tried_where_they_become_whole_numbers():
    assert not extremes(lambda x: x.exp(), FLOATS)
    assert extremes(lambda x: x.long(), FLOATS)
    assert extremes(lambda x: x % 7, FLOATS)
    assert extremes(torch.special.round, FLOATS)
    assert extremes(lambda x: torch.div(x, 7, rounding_mode="floor"), FLOATS)
    assert not extremes(lambda x: torch.div(x, 7), FLOATS)


def test_layout_is_kept():
    (value,) = extremes(lambda x: x + 1, INTS.t())[f"{EXTREME} x"]
    assert value.stride() == INTS.t().stride()


@torch.library.custom_op("tests_extremes::peek", mutates_args=())
def peek(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.clone()


@peek.register_fake
def _(x, index):
    return torch.empty_like(x)


def looped(x):
    return torch.while_loop(lambda x: (x > 0).any(), lambda x: (x - 1,), (x,))[0]


@pytest.mark.parametrize(
    ("model", "args"),
    [
        (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (INTS, INTS + 1)),
        (lambda x: torch.div(x, -1, rounding_mode="floor"), (INTS,)),
        (lambda x, y: x % y, (INTS, INTS + 1)),
        (looped, (INTS,)),
        (peek, (FLOATS.double(), INTS)),
        (lambda lu, pivots: torch.linalg.lu_solve(lu, pivots, lu), (torch.eye(8), torch.arange(1, 9).int())),
        (lambda i, x: torch.nn.functional.embedding_bag(i, x), (INTS, torch.ones(64, 2))),
    ],
)
def test_where_a_value_may_end_the_process_or_decide_how_much_is_done_none_is_tried(model, args):
    assert not extremes(model, *args)


def test_a_division_by_a_number_or_of_floats_is_tried():
    assert extremes(lambda x: x // 3, INTS)
    assert extremes(lambda x, y: x / y, INTS, INTS + 1)


def test_of_an_index_the_first_and_the_last_that_exist_are_tried():
    found = extremes(lambda i, n, x: x[i + 1] * n, INTS[0] % 4, INTS[0], torch.ones(8))
    index, number, _ = found[EXTREME]
    assert (int(index.min()), int(index.max())) == (-9, 6)
    assert int(number.max()) == 2**63 - 1
    assert torch.equal(found[f"{EXTREME} n"][0], INTS[0] % 4)


def test_an_index_into_two_tables_exists_in_both():
    found = extremes(
        lambda i, x, y: x[i] + torch.nn.functional.embedding(i, y)[:, 0], INTS[0] % 4, torch.ones(8), torch.ones(5, 2)
    )
    assert (int(found[f"{EXTREME} i"][0].min()), int(found[f"{EXTREME} i"][0].max())) == (0, 4)


def test_what_eager_refuses_is_skipped_and_the_others_are_compared():
    model = nn.Embedding(64, 2).eval()

    def scaled(ids, n):
        return model(torch.where(ids > 0, ids, 0)) * n

    args = (INTS, INTS[..., None])
    oracle = Oracle(scaled, tsopt.example(*args), tsopt.capture(scaled, args))
    kinds = {expected.inputs.kind for expected in oracle.expected}
    assert f"{EXTREME} n" in kinds
    assert f"{EXTREME} ids" not in kinds
    assert any(text.startswith(f"{EXTREME} ids: eager raises IndexError") for text in oracle.skipped)


def test_a_candidate_that_computes_in_32_bits_is_found_out():
    def model(x):
        return x // 1000

    oracle = Oracle(model, tsopt.example(INTS), tsopt.capture(model, INTS))
    verdict = oracle.judge(lambda x: (x.int() // 1000).long())
    assert not verdict.ok
    assert f"{EXTREME} x" in verdict.reason
    assert oracle.judge(lambda x: x // 1000).ok


def test_exponents_that_float32_lacks_are_tried_by_themselves():
    found = extremes(lambda x: x * 2, FLOATS.double())
    (ordinary,), (exponents,) = found[f"{EXTREME} x"], found[f"{EXTREME} x exponents"]
    assert float(ordinary.abs().max()) < 1e38
    assert set(exponents.tolist()) == {1e300, 1e-300}
    single = extremes(lambda x: x * 2, torch.ones(1).double())
    assert {value.item() for kind, (value,) in single.items() if "exponents" in kind} == {1e300, 1e-300}
    assert not any("exponents" in kind for kind in extremes(lambda x: x.long(), FLOATS))


def centred(x):
    x = x.float()
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("model", "candidate"),
    [
        (lambda x: torch.where(x.abs() > 1e9, x * 3, x * 2), lambda x: x * 2),
        (centred, lambda x: centred(x.clamp(-1e12, 1e12))),
        (lambda x: x * 2, lambda x: (x * 2).clamp(-1e299, 1e299)),
        (lambda x: x * 2, lambda x: torch.where(x.abs() < 1e-200, x, x * 2)),
    ],
)
def test_a_candidate_that_is_wrong_for_large_numbers_alone_is_found_out(model, candidate):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    oracle = Oracle(model, tsopt.example(x), tsopt.capture(model, x))
    verdict = oracle.judge(candidate)
    assert not verdict.ok
    assert EXTREME in verdict.reason
    assert oracle.judge(lambda x: model(x)).ok


# ---- multiples of a divisor ---------------------------------------------------------------------------------

MULTIPLES = f"{EXTREME} multiples"


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x / 7).ceil(),
        lambda x: ((x / 7) == 3) * x,
        lambda x: (x / 7).long(),
        lambda x: torch.div(x / 7 * 2, 2, rounding_mode="floor"),
        lambda x: torch.nn.functional.pad(x / 7, (1, 1)).floor(),
        lambda x: (x / 7).reshape(8, 8).max(-1).values.floor(),
    ],
)
def test_multiples_are_tried_where_a_quotient_decides(model):
    (values,) = extremes(model, FLOATS)[MULTIPLES]
    assert bool((values % 7 == 0).all())
    assert {1, -1} <= set(values.sign().tolist())
    assert bool(((values * (1 / torch.tensor(7.0))) % 1 != 0).all())


def test_multiples_are_tried_of_whole_numbers():
    (values,) = extremes(lambda x: (x / 3).ceil(), INTS.to(torch.uint8))[MULTIPLES]
    assert len(values.unique()) > 9
    assert bool((values % 3 == 0).all())


def test_an_index_is_no_multiple():
    i, x = extremes(lambda i, x: (x[i] / 7).ceil(), INTS[0] % 4, torch.ones(8))[MULTIPLES]
    assert torch.equal(i, INTS[0] % 4)
    assert bool((x % 7 == 0).all())


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x / 7,
        lambda x: (x / 8).ceil(),
        lambda x: x.ceil() / 7,
        lambda x: x * 13 * 0.1,
        lambda x: (x * 2 * 0.1).ceil(),
    ],
)
def test_multiples_are_not_tried_elsewhere(model):
    assert MULTIPLES not in extremes(model, FLOATS)


@pytest.mark.parametrize("model", [lambda x: (x * 13 * 0.1).floor(), lambda x: F.pad(x * 13 * 0.1, (1, 1)) >= 117])
def test_whole_numbers_are_tried_of_which_two_factors_make_others(model):
    (values,) = extremes(model, FLOATS)[MULTIPLES]
    assert bool(((values * 13 * 0.1) % 1 == 0).all())
    assert bool(((values * 1.3) % 1 != 0).all())


@pytest.mark.parametrize(("first", "second"), [(13, 0.1), (3, 0.1)])
def test_a_candidate_that_makes_one_factor_of_two_is_found_out(first, second):
    def model(x):
        return (x * first * second).floor()

    oracle = Oracle(model, tsopt.example(FLOATS), tsopt.capture(model, FLOATS))
    verdict = oracle.judge(lambda x: (x * (first * second)).floor())
    assert not verdict.ok
    assert MULTIPLES in verdict.reason
    assert oracle.judge(model).ok


def test_a_candidate_that_multiplies_by_the_inverse_is_found_out():
    def model(x):
        return (x / 7).ceil()

    oracle = Oracle(model, tsopt.example(FLOATS), tsopt.capture(model, FLOATS))
    verdict = oracle.judge(lambda x: (x * (1 / 7)).ceil())
    assert not verdict.ok
    assert MULTIPLES in verdict.reason
    assert oracle.judge(lambda x: (x / 7).ceil()).ok
