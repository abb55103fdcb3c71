"""Two casts as one or none, where no value is lost between them."""

from __future__ import annotations

import pytest
import torch

from tests.passes.examples import INTS, N
from tests.passes.helpers import check, specials
from tsopt.compiler.rewriting.rewrite import USED_ELSEWHERE, RulePass
from tsopt.passes import DeadCode, algebra
from tsopt.passes.algebra import holds

CASTS = (DeadCode(), RulePass("casts", (algebra.cast_cast,)))  # the first takes the checks that export puts between


def test_a_cast_through_a_wider_type_goes():
    check(CASTS, lambda x: x.double().float().neg(), specials(N), ["neg"])


def test_two_casts_become_one():
    check(CASTS, lambda x: x.double().half().neg(), specials(N), ["to.dtype", "neg"])


@pytest.mark.parametrize("target", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_float_to_integer_through_double_is_merged_only_if_the_bits_stay(target):
    """Out of range and NaN as well: EXACT is a promise for every input."""
    values = [300.0, -300.0, 3e9, -3e9, 1e19, -1e19, float("nan"), float("inf"), float("-inf"), 70000.0, -1.5, 2.0**31]
    check(CASTS, lambda x: x.double().to(target), torch.tensor(values).repeat(3), also=[])


@pytest.mark.parametrize(
    ("x", "through", "to"),
    [
        (specials(N), torch.float16, torch.float32),
        (specials(N), torch.bfloat16, torch.float32),
        (specials(N), torch.int32, torch.float32),
        (specials(N).half(), torch.bfloat16, torch.float16),
        (specials(N).bfloat16(), torch.float16, torch.bfloat16),
        (INTS, torch.float32, torch.int64),
        (INTS, torch.float64, torch.int64),
        (INTS, torch.int32, torch.int64),
        (torch.tensor([200, 3], dtype=torch.uint8), torch.int8, torch.int32),
        (torch.tensor([-2, 3], dtype=torch.int8), torch.uint8, torch.int32),
        (torch.tensor([2.5, 0.0]), torch.bool, torch.float32),
        (torch.tensor([1 + 2j]), torch.complex128, torch.complex64),
    ],
    ids=lambda v: str(v.dtype if isinstance(v, torch.Tensor) else v).removeprefix("torch."),
)
def test_a_cast_that_loses_values_stays(x, through, to):
    found = check(CASTS, lambda x: x.to(through).to(to).clone(), x)
    assert "cast_cast" not in found.done
    assert ("cast_cast", algebra.LOSES) in found.declined


def test_casts_that_cancel_stay_where_the_output_would_be_the_input():
    """x.double().float() is a new tensor in eager: who writes to it does not write to x."""
    check(CASTS, lambda x: x.double().float(), specials(N))


def test_casts_with_a_shared_middle_stay():
    def model(x):
        y = x.double()
        return y.float().neg(), y.neg()

    found = check(CASTS, model, specials(N))
    assert ("cast_cast", USED_ELSEWHERE) in found.declined


KINDS = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("wide", KINDS)
@pytest.mark.parametrize("narrow", KINDS)
def test_holds_is_a_round_trip_of_the_extremes(wide, narrow):
    """What `holds` says is what torch does with the hardest values of the narrow type."""
    source, target = getattr(torch, narrow), getattr(torch, wide)
    if source == torch.bool:
        hard = torch.tensor([True, False])
    elif source.is_floating_point:
        limits = torch.finfo(source)
        hard = torch.tensor([limits.max, limits.tiny, 1 + limits.eps, 1.5], dtype=torch.float64).to(source)
    else:
        limits = torch.iinfo(source)
        hard = torch.tensor([limits.min, limits.max, limits.max - 1, 3], dtype=source)
    if not holds(target, narrow):
        return
    through = hard.to(target)
    assert torch.equal(through.to(source), hard)
    if through.is_floating_point() and not source.is_floating_point:
        # The largest int64 comes back from a double saturated, as if it had been held: ask Python's exact integers.
        assert [int(value) for value in through.double().tolist()] == [int(value) for value in hard.tolist()]


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [("float64", "int32"), ("float32", "int16"), ("float16", "int8"), ("bfloat16", "uint8"), ("float32", "bfloat16")],
)
def test_holds_is_not_too_careful(wide, narrow):
    assert holds(getattr(torch, wide), narrow)
