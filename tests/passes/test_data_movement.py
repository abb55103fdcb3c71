"""Chains of moves: where they undo or continue each other, and where they only seem to."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.passes.helpers import SPECIAL, aten, check, check_declines, check_fires, of_any_dtype, ops_of, specials
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT, USED_ELSEWHERE, RulePass
from tsopt.passes import CANONICALIZE, DATA_MOVEMENT, DeadCode, data_movement

N = len(SPECIAL)
DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool]
X = specials(2, 3, 4)


def with_forms(item):
    """The rule after the forms it is written for."""
    return (DeadCode(), CANONICALIZE, RulePass(item.name, (item,)), DeadCode("dce-again"))


def test_every_rule_is_exact_and_has_an_equation():
    assert all(item.numerics == Numerics.EXACT and "->" in item.doc for item in data_movement.RULES)


# ---- permute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 3, 3), (1, 7, 2), (0, 2, 3)])
def test_permute_permute_becomes_one(shape, dtype):
    found = check_fires(
        data_movement.permute_permute,
        lambda x: x.permute(1, 2, 0).permute(-1, 1, 0).logical_not(),
        of_any_dtype(*shape, dtype=dtype),
        ops=["permute", "logical_not"],
    )
    assert "[0, 2, 1]" in found.after.text


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.permute(1, 2, 0).permute(2, 0, 1).neg(),
        lambda x: x.transpose(0, 2).transpose(2, 0).neg(),
        lambda x: x.mT.transpose(-1, 1).neg(),
        lambda x: x.movedim(0, 2).movedim(2, 0).neg(),
    ],
)
def test_permutes_that_cancel_go(model):
    found = check(with_forms(data_movement.permute_permute), model, X, ["neg"])
    assert found.after.numerics == Numerics.EXACT


def test_a_cube_permuted_twice_is_permuted_still():
    check_fires(
        data_movement.permute_permute, lambda x: x.permute(1, 2, 0).permute(1, 2, 0), specials(3, 3, 3), ops=["permute"]
    )


def test_permutes_with_a_shared_middle_stay():
    def model(x):
        y = x.permute(1, 0, 2)
        return y.permute(2, 0, 1).neg(), y + 1

    check_declines(data_movement.permute_permute, model, X, USED_ELSEWHERE)


@pytest.mark.parametrize("model", [lambda x: x.permute(1, 0, 2), lambda x: x.permute(1, 0, 2).neg().permute(1, 0, 2)])
def test_other_permutes_stay(model):
    check_declines(data_movement.permute_permute, model, X)


def test_a_permute_between_copies_is_no_chain():
    """The copy in the middle has its own layout."""
    check_declines(data_movement.permute_permute, lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2) + 1, X)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 1, 4), (1, 0, 2)), ((2, 1, 4), (0, 2, 1)), ((1, 3, 1, 2), (1, 0, 3, 2)), ((0, 1), (1, 0)), ((1, 5), (1, 0))],
)
def test_a_permute_of_axes_of_size_one_is_a_reshape(shape, axes, dtype):
    x = of_any_dtype(*shape, dtype=dtype)
    check_fires(data_movement.permute_ones, lambda x: x.permute(axes).logical_not(), x, ops=["reshape", "logical_not"])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 1, 4), (2, 1, 0)), ((2, 3), (1, 0)), ((1, 3, 2), (2, 0, 1)), ((0, 2), (1, 0)), ((3, 3), (1, 0))],
)
def test_a_permute_of_larger_axes_stays(shape, axes):
    check_declines(data_movement.permute_ones, lambda x: x.permute(axes).neg(), torch.randn(shape))


def test_a_permute_of_ones_that_keeps_the_shape_goes():
    check_fires(data_movement.permute_ones, lambda x: x.permute(0, 2, 1).neg(), specials(2, 1, 1), ops=["neg"])


def test_a_returned_permute_of_ones_is_a_view_still():
    check_fires(data_movement.permute_ones, lambda x: x.permute(1, 0, 2), specials(2, 1, 4), ops=["reshape"])


# ---- reshape ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.view(6, 4).view(3, 8),
        lambda x: x.view(6, -1).reshape(3, -1),
        lambda x: x.unsqueeze(1).flatten().view(3, 8),
        lambda x: x.reshape(24).unflatten(0, (3, 8)).squeeze(),
    ],
)
def test_reshape_reshape_becomes_one(model, dtype):
    x = of_any_dtype(2, 3, 4, dtype=dtype)
    found = check(
        with_forms(data_movement.reshape_reshape), lambda x: model(x).logical_not(), x, ["reshape", "logical_not"]
    )
    assert "reshape_reshape" in found.done
    assert found.after.numerics == Numerics.EXACT


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 7)])
def test_reshapes_that_cancel_go(shape):
    found = check(
        with_forms(data_movement.reshape_reshape), lambda x: x.flatten().view(shape).neg(), torch.randn(shape), ["neg"]
    )
    assert "reshape_reshape" in found.done


def test_a_reshape_that_copies_is_not_merged_into_a_view_of_other_layout():
    """x.t() must be copied to become flat; [2, 3] straight from x.t() has other strides."""
    check_declines(
        data_movement.reshape_reshape, lambda x: x.t().reshape(6).reshape(2, 3), specials(3, 2), OTHER_LAYOUT
    )


def test_reshapes_with_a_shared_middle_stay():
    def model(x):
        y = x.reshape(6)
        return y.reshape(3, 2) + 1, y * 2

    check_declines(data_movement.reshape_reshape, model, specials(2, 3), USED_ELSEWHERE)


def test_a_copy_that_is_returned_is_a_copy_still():
    check(DATA_MOVEMENT, lambda x: x.t().reshape(6).reshape(3, 2), specials(2, 3))


CANCELS = [
    ((2, 3, 4, 5), lambda x: x.permute(0, 2, 3, 1).reshape(2, 20, 3).permute(0, 2, 1)),
    ((2, 20, 3), lambda x: x.permute(0, 2, 1).reshape(2, 3, 4, 5).permute(0, 2, 3, 1)),
    ((4, 6, 5), lambda x: x.permute(1, 0, 2).reshape(2, 3, 4, 5).permute(2, 0, 1, 3)),
    ((2, 4, 6), lambda x: x.permute(2, 0, 1).reshape(6, 8).permute(1, 0)),
    ((2, 3, 4), lambda x: x.permute(1, 2, 0).reshape(1, 12, 2, 1).permute(2, 0, 1, 3)),
    ((1, 2, 1, 3), lambda x: x.permute(3, 0, 2, 1).reshape(3, 2).permute(1, 0)),
    ((12, 7), lambda x: x.permute(1, 0).reshape(7, 2, 3, 2).permute(1, 2, 3, 0)),
]


@pytest.mark.parametrize(("shape", "model"), CANCELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_permute_undone_through_a_reshape_is_a_reshape(shape, model, dtype):
    x = of_any_dtype(*shape, dtype=dtype)
    check_fires(
        data_movement.permute_reshape_permute, lambda x: model(x).logical_not(), x, ops=["reshape", "logical_not"]
    )


@pytest.mark.parametrize("shape", [(6, 4), (24,), (2, 12)])
def test_a_permute_undone_before_a_reshape_goes(shape):
    """The reshape in the middle copies: only the last one gives back the layout that was there before."""

    def model(x):
        return x.permute(1, 0, 2).reshape(12, 2).reshape(3, 2, 4).permute(1, 0, 2)

    check_declines(data_movement.permute_reshape_permute, lambda x: model(x) + 1, X, OTHER_LAYOUT)
    check_fires(
        data_movement.permute_reshape_permute, lambda x: model(x).reshape(shape).neg(), X, ops=["reshape", "neg"]
    )


@pytest.mark.parametrize(
    ("shape", "model"),
    [
        ((2, 3, 4, 5), lambda x: x.permute(0, 2, 3, 1).reshape(2, 20, 3).permute(1, 0, 2)),
        ((2, 3, 4, 5), lambda x: x.permute(0, 2, 3, 1).reshape(2, 12, 5).permute(0, 2, 1)),
        ((2, 3, 4), lambda x: x.permute(1, 2, 0).reshape(8, 3).permute(1, 0)),
        ((4, 6), lambda x: x.permute(1, 0).reshape(4, 6).permute(1, 0)),
        ((6, 6), lambda x: x.permute(1, 0).reshape(2, 3, 6).permute(2, 1, 0)),
        ((2, 2, 2), lambda x: x.permute(2, 1, 0).reshape(2, 4).permute(1, 0)),
        ((0, 3, 2), lambda x: x.permute(1, 2, 0).reshape(0, 6).permute(1, 0)),
        ((2, 3, 2), lambda x: x.permute(2, 1, 0).reshape(4, 3).permute(1, 0).reshape(12)),  # cuts through pieces
    ],
)
def test_a_permute_that_is_not_undone_stays(shape, model):
    check_declines(data_movement.permute_reshape_permute, lambda x: model(x).neg(), torch.randn(shape))


def test_every_small_chain_of_permutes_is_judged_right():
    """The rule against the elements themselves: fires just where the order is that of the argument."""
    seen = {True: 0, False: 0}
    for p in itertools.permutations(range(3)):
        for middle in [(2, 2, 6), (4, 6), (6, 2, 2), (2, 12), (3, 4, 2), (2, 3, 4), (24,), (8, 3), (1, 4, 1, 6)]:
            for q in itertools.permutations(range(len(middle))):
                order = torch.arange(24).reshape(2, 3, 4).permute(p).reshape(middle).permute(q).flatten()
                keeps_order = torch.equal(order, torch.arange(24))
                assert data_movement.is_undone((2, 3, 4), list(p), middle, list(q)) == keeps_order
                from_the_end = [axis - 3 for axis in p], middle, [axis - len(middle) for axis in q]
                assert data_movement.is_undone((2, 3, 4), *from_the_end) == keeps_order
                seen[keeps_order] += 1
    assert seen[True] > 30
    assert seen[False] > 200


# ---- expand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 3), (1, 2, 3), (0, 2, 3)])
def test_expand_expand_becomes_one(shape, dtype):
    x = of_any_dtype(1, 3, dtype=dtype)
    found = check_fires(
        data_movement.expand_expand,
        lambda x: x.expand(2, 3).expand(shape).logical_not(),
        x,
        ops=["expand", "logical_not"],
    )
    assert str(list(shape)) in found.after.text


def test_expands_with_a_shared_middle_stay():
    def model(x):
        y = x.expand(2, 3)
        return y.expand(4, 2, 3) + 1, y.neg()

    check_declines(data_movement.expand_expand, model, specials(1, 3), USED_ELSEWHERE)


@pytest.mark.parametrize(
    "model", [lambda x: x.expand(2, 3).repeat(2, 1), lambda x: x.expand(2, 3).reshape(6).expand(2, 6)]
)
def test_other_expands_stay(model):
    check_declines(data_movement.expand_expand, model, specials(1, 3))


ELEMENTWISE = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "and": torch.logical_and, "or": torch.logical_or,
    "where": lambda x, y: torch.where(y > 0, x, y), "where right": lambda x, y: torch.where(y > 0, y, x),
    "where mask": lambda x, y: torch.where((x > 0).expand(y.shape), y, y + 1),
}  # fmt: skip


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_expand_beside_a_whole_value_goes(name, side):
    def model(x, y):
        wide = x.expand(2, 3, N) if name != "where mask" else x
        return ELEMENTWISE[name](*((wide, y) if not side or "where" in name else (y, wide)))

    found = check_fires(data_movement.expand_dropped, model, (specials(3, 1), specials(2, 3, N)))
    assert "expand" not in found.ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 1), (0, 3, 2)])
def test_an_expand_goes_for_any_type_and_shape(shape, dtype):
    x, y = of_any_dtype(3, 1, dtype=dtype), of_any_dtype(*shape, dtype=dtype)
    check_fires(data_movement.expand_dropped, lambda x, y: x.expand(shape) * y, (x, y), ops=["mul.Tensor"])


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or"])
def test_an_expanded_mask_goes(name):
    x, y = specials(3, 1) > 0, specials(2, 3, 4) < 1
    check_fires(data_movement.expand_dropped, lambda x, y: getattr(torch, name)(x.expand(2, 3, 4), y), (x, y))


def test_an_expand_used_twice_goes_on_each_side():
    def model(x, y):
        wide = x.expand(2, 3, 4)
        return wide + y, y - wide

    check_fires(data_movement.expand_dropped, model, (specials(3, 1), X), ops=["add.Tensor", "sub.Tensor"])


def test_two_expands_that_meet_both_go():
    model = lambda x, y: x.expand(3, 4) + y.expand(3, 4)  # noqa: E731
    check_fires(data_movement.expand_dropped, model, (specials(3, 1), specials(1, 4)), ops=["add.Tensor"])


@pytest.mark.parametrize(
    ("model", "x", "y"),
    [
        (lambda x, y: x.expand(2, 3, 4) + y, specials(3, 1), specials(1, 3, 4)),  # the expand gives the shape
        (lambda x, y: x.expand(3, 4) * 2.0, specials(3, 1), specials(1)),
        (lambda x, y: x.expand(3, 4) @ y, specials(3, 1), specials(4, 4)),
        (lambda x, y: torch.add(x.expand(3, 4), y, alpha=2), specials(3, 1), specials(3, 4)),
        (lambda x, y: x.expand(3) + y, torch.tensor(1.0, dtype=torch.float64), torch.ones(3)),  # promotes less
        (lambda x, y: x.expand(3) < y, torch.tensor(0.1, dtype=torch.float64), torch.ones(3)),
        (lambda x, y: torch.cat([x.expand(3, 4), y]), specials(3, 1), specials(3, 4)),
    ],
)
def test_an_expand_that_is_needed_stays(model, x, y):
    check_declines(data_movement.expand_dropped, model, (x, y))


@pytest.mark.parametrize(("dtype", "number"), [(torch.float16, 2049), (torch.bfloat16, 257)])
@pytest.mark.parametrize("name", ["mul", "div"])
def test_an_expand_stays_where_half_precision_would_not_round_its_one_number(name, dtype, number):
    x, one = torch.linspace(-3, 3, 64).to(dtype), torch.tensor([number])
    model = lambda x, one: ELEMENTWISE[name](x, one.expand(64))  # noqa: E731
    check_declines(data_movement.expand_dropped, model, (x, one), exact=True)
    check_fires(data_movement.expand_dropped, model, (x, one.to(dtype)), exact=True)


def test_an_expand_that_decides_the_layout_stays():
    y = torch.randn(3, 2).t()
    found = check(data_movement.expand_dropped, lambda x, y: x.expand(2, 3) + y, (torch.randn(1, 3), y))
    assert found.done or ("expand_dropped", OTHER_LAYOUT) in found.declined


# ---- the table --------------------------------------------------------------------------------------------


def test_windows_made_and_put_together_again_are_gone():
    """Two reshapes and two permutes on the way there, as many on the way back."""

    def model(x):
        n, h, w, c = x.shape
        windows = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        back = windows.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return back.relu()

    check((CANONICALIZE, DATA_MOVEMENT), model, torch.randn(2, 4, 6, 3), ["relu"])


def test_images_made_tokens_and_images_again_are_reshaped_once():
    def model(x):
        tokens = x.permute(0, 2, 3, 1).flatten(1, 2)
        return tokens.transpose(1, 2).unflatten(2, (4, 5)).relu()

    check((CANONICALIZE, DATA_MOVEMENT), model, torch.randn(2, 3, 4, 5), ["relu"])


def test_exported_splits_stay_splits():
    def model(x):
        a, b = x.chunk(2, -1)
        return a * b.sigmoid()

    program = check((DeadCode(), CANONICALIZE, DATA_MOVEMENT), model, torch.randn(2, 4)).after
    assert ops_of(program) == ["chunk", "getitem", "getitem", "sigmoid", "mul.Tensor"]


def test_rules_work_together_and_come_to_rest():
    def model(x, y):
        both = torch.cat([x.transpose(0, 1).transpose(0, 1)[:2], x[2:], torch.cat([y, y.view(-1).view(3, 4)])])
        return both[:3].permute(1, 0).permute(1, 0) + y[:1].expand(3, 4) * both[3:6]

    found = check((DeadCode(), CANONICALIZE, DATA_MOVEMENT), model, (torch.randn(3, 4), torch.randn(3, 4)))
    assert set(found.ops) <= {"slice.Tensor", "mul.Tensor", "add.Tensor"}


def test_aten_names_of_splits_are_known():
    model = lambda x: torch.cat(list(aten.split.sizes(x * 2, [3, 4]))).relu()  # noqa: E731
    found = check((DATA_MOVEMENT, DeadCode()), model, specials(7, 2))
    assert "cat" not in found.ops
