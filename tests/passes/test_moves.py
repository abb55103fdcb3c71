"""Chains of moves: where they undo or continue each other, and where they only seem to."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import SPECIAL, aten, check, check_declines, check_fires, ops_of, specials
from tsopt.compiler.program import Numerics
from tsopt.compiler.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, RulePass
from tsopt.passes import FUSE, MOVES, NORMALIZE, DeadCode, moves

N = len(SPECIAL)
DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool]
X = specials(2, 3, 4)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return specials(*shape, dtype=dtype) if dtype.is_floating_point else torch.randint(0, 9, shape).to(dtype)


def with_forms(item):
    """The rule after the forms it is written for."""
    return (DeadCode(), NORMALIZE, RulePass(item.name, (item,)), DeadCode("dce-again"))


def test_every_rule_is_exact_and_has_an_equation():
    assert all(item.numerics == Numerics.EXACT and "->" in item.doc for item in moves.RULES)


# ---- permute ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 3, 3), (1, 7, 2), (0, 2, 3)])
def test_permute_permute_becomes_one(shape, dtype):
    found = check_fires(
        moves.permute_permute,
        lambda x: x.permute(1, 2, 0).permute(-1, 1, 0).logical_not(),
        values(*shape, dtype=dtype),
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
    found = check(with_forms(moves.permute_permute), model, X, ["neg"])
    assert found.after.numerics == Numerics.EXACT


def test_a_cube_permuted_twice_is_permuted_still():
    check_fires(
        moves.permute_permute, lambda x: x.permute(1, 2, 0).permute(1, 2, 0), specials(3, 3, 3), ops=["permute"]
    )


def test_permutes_with_a_shared_middle_stay():
    def model(x):
        y = x.permute(1, 0, 2)
        return y.permute(2, 0, 1).neg(), y + 1

    check_declines(moves.permute_permute, model, X, USED_ELSEWHERE)


@pytest.mark.parametrize("model", [lambda x: x.permute(1, 0, 2), lambda x: x.permute(1, 0, 2).neg().permute(1, 0, 2)])
def test_other_permutes_stay(model):
    check_declines(moves.permute_permute, model, X)


def test_a_permute_between_copies_is_no_chain():
    """The copy in the middle has its own layout."""
    check_declines(moves.permute_permute, lambda x: x.permute(1, 0, 2).contiguous().permute(1, 0, 2) + 1, X)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 1, 4), (1, 0, 2)), ((2, 1, 4), (0, 2, 1)), ((1, 3, 1, 2), (1, 0, 3, 2)), ((0, 1), (1, 0)), ((1, 5), (1, 0))],
)
def test_a_permute_of_axes_of_size_one_is_a_reshape(shape, axes, dtype):
    x = values(*shape, dtype=dtype)
    check_fires(moves.permute_ones, lambda x: x.permute(axes).logical_not(), x, ops=["reshape", "logical_not"])


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((2, 1, 4), (2, 1, 0)), ((2, 3), (1, 0)), ((1, 3, 2), (2, 0, 1)), ((0, 2), (1, 0)), ((3, 3), (1, 0))],
)
def test_a_permute_of_larger_axes_stays(shape, axes):
    check_declines(moves.permute_ones, lambda x: x.permute(axes).neg(), torch.randn(shape))


def test_a_permute_of_ones_that_keeps_the_shape_goes():
    check_fires(moves.permute_ones, lambda x: x.permute(0, 2, 1).neg(), specials(2, 1, 1), ops=["neg"])


def test_a_returned_permute_of_ones_is_a_view_still():
    check_fires(moves.permute_ones, lambda x: x.permute(1, 0, 2), specials(2, 1, 4), ops=["reshape"])


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
    x = values(2, 3, 4, dtype=dtype)
    found = check(with_forms(moves.reshape_reshape), lambda x: model(x).logical_not(), x, ["reshape", "logical_not"])
    assert "reshape_reshape" in found.done
    assert found.after.numerics == Numerics.EXACT


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (0, 7)])
def test_reshapes_that_cancel_go(shape):
    found = check(
        with_forms(moves.reshape_reshape), lambda x: x.flatten().view(shape).neg(), torch.randn(shape), ["neg"]
    )
    assert "reshape_reshape" in found.done


def test_a_reshape_that_copies_is_not_merged_into_a_view_of_other_layout():
    """x.t() must be copied to become flat; [2, 3] straight from x.t() has other strides."""
    check_declines(moves.reshape_reshape, lambda x: x.t().reshape(6).reshape(2, 3), specials(3, 2), OTHER_LAYOUT)


def test_reshapes_with_a_shared_middle_stay():
    def model(x):
        y = x.reshape(6)
        return y.reshape(3, 2) + 1, y * 2

    check_declines(moves.reshape_reshape, model, specials(2, 3), USED_ELSEWHERE)


def test_a_copy_that_is_returned_is_a_copy_still():
    check(MOVES, lambda x: x.t().reshape(6).reshape(3, 2), specials(2, 3))


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
    x = values(*shape, dtype=dtype)
    check_fires(moves.permute_reshape_permute, lambda x: model(x).logical_not(), x, ops=["reshape", "logical_not"])


@pytest.mark.parametrize("shape", [(6, 4), (24,), (2, 12)])
def test_a_permute_undone_before_a_reshape_goes(shape):
    """The reshape in the middle copies: only the last one gives back the layout that was there before."""

    def model(x):
        return x.permute(1, 0, 2).reshape(12, 2).reshape(3, 2, 4).permute(1, 0, 2)

    check_declines(moves.permute_reshape_permute, lambda x: model(x) + 1, X, OTHER_LAYOUT)
    check_fires(moves.permute_reshape_permute, lambda x: model(x).reshape(shape).neg(), X, ops=["reshape", "neg"])


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
    check_declines(moves.permute_reshape_permute, lambda x: model(x).neg(), torch.randn(shape))


def test_every_small_chain_of_permutes_is_judged_right():
    """The rule against the elements themselves: fires just where the order is that of the argument."""
    seen = {True: 0, False: 0}
    for p in itertools.permutations(range(3)):
        for middle in [(2, 2, 6), (4, 6), (6, 2, 2), (2, 12), (3, 4, 2), (2, 3, 4), (24,), (8, 3), (1, 4, 1, 6)]:
            for q in itertools.permutations(range(len(middle))):
                order = torch.arange(24).reshape(2, 3, 4).permute(p).reshape(middle).permute(q).flatten()
                keeps_order = torch.equal(order, torch.arange(24))
                assert moves.is_undone((2, 3, 4), list(p), middle, list(q)) == keeps_order
                from_the_end = [axis - 3 for axis in p], middle, [axis - len(middle) for axis in q]
                assert moves.is_undone((2, 3, 4), *from_the_end) == keeps_order
                seen[keeps_order] += 1
    assert seen[True] > 30
    assert seen[False] > 200


# ---- expand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 2, 3), (1, 2, 3), (0, 2, 3)])
def test_expand_expand_becomes_one(shape, dtype):
    x = values(1, 3, dtype=dtype)
    found = check_fires(
        moves.expand_expand, lambda x: x.expand(2, 3).expand(shape).logical_not(), x, ops=["expand", "logical_not"]
    )
    assert str(list(shape)) in found.after.text


def test_expands_with_a_shared_middle_stay():
    def model(x):
        y = x.expand(2, 3)
        return y.expand(4, 2, 3) + 1, y.neg()

    check_declines(moves.expand_expand, model, specials(1, 3), USED_ELSEWHERE)


@pytest.mark.parametrize(
    "model", [lambda x: x.expand(2, 3).repeat(2, 1), lambda x: x.expand(2, 3).reshape(6).expand(2, 6)]
)
def test_other_expands_stay(model):
    check_declines(moves.expand_expand, model, specials(1, 3))


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

    found = check_fires(moves.expand_dropped, model, (specials(3, 1), specials(2, 3, N)))
    assert "expand" not in found.ops


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 7), (1, 3, 1), (0, 3, 2)])
def test_an_expand_goes_for_any_type_and_shape(shape, dtype):
    x, y = values(3, 1, dtype=dtype), values(*shape, dtype=dtype)
    check_fires(moves.expand_dropped, lambda x, y: x.expand(shape) * y, (x, y), ops=["mul.Tensor"])


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or"])
def test_an_expanded_mask_goes(name):
    x, y = specials(3, 1) > 0, specials(2, 3, 4) < 1
    check_fires(moves.expand_dropped, lambda x, y: getattr(torch, name)(x.expand(2, 3, 4), y), (x, y))


def test_an_expand_used_twice_goes_on_each_side():
    def model(x, y):
        wide = x.expand(2, 3, 4)
        return wide + y, y - wide

    check_fires(moves.expand_dropped, model, (specials(3, 1), X), ops=["add.Tensor", "sub.Tensor"])


def test_two_expands_that_meet_both_go():
    model = lambda x, y: x.expand(3, 4) + y.expand(3, 4)  # noqa: E731
    check_fires(moves.expand_dropped, model, (specials(3, 1), specials(1, 4)), ops=["add.Tensor"])


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
    check_declines(moves.expand_dropped, model, (x, y))


def test_an_expand_that_decides_the_layout_stays():
    y = torch.randn(3, 2).t()
    found = check(moves.expand_dropped, lambda x, y: x.expand(2, 3) + y, (torch.randn(1, 3), y))
    assert found.done or ("expand_dropped", OTHER_LAYOUT) in found.declined


# ---- slice ------------------------------------------------------------------------------------------------

SLICES = {
    "both": lambda x: x[2:9][1:4],
    "ends": lambda x: x[:-2][3:],
    "steps": lambda x: x[1::2][::3],
    "last": lambda x: x[::3][-1:],
    "empty": lambda x: x[2:5][3:],
    "index": lambda x: x[2:9][4],
    "index of steps": lambda x: x[1::4][-1],
    "another axis": lambda x: x.t()[:, 2:9][:, 1:4],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SLICES)
def test_slice_slice_becomes_one(name, dtype):
    x = values(11, 3, dtype=dtype)
    found = check(with_forms(moves.slice_slice), lambda x: SLICES[name](x).logical_not(), x, exact=True)
    assert [op for op in found.ops if op in ("slice.Tensor", "select.int")] == [
        "select.int" if name.startswith("index") else "slice.Tensor"
    ]


def test_slices_of_every_size_are_taken_right():
    spans = [(a, b, s) for a in (0, 1, 3) for b in (0, 2, 5, 7) for s in (1, 2, 3)]

    def model(x):
        return tuple(x[a:b:s][c:d:t] + 1 for a, b, s in spans[::4] for c, d, t in spans[::5])

    check(with_forms(moves.slice_slice), model, torch.arange(7.0), exact=True)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x[2:9, :2],
        lambda x: x[2:9][:, 1],
        lambda x: x[2:9].neg()[1:3],
        lambda x: x[2:9],
        lambda x: x[2:9].split(2)[0],
    ],
)
def test_other_slices_stay(model):
    check_declines(moves.slice_slice, lambda x: model(x) + 1, specials(11, 3))


def test_slices_with_a_shared_middle_stay():
    def model(x):
        y = x[2:9]
        return y[1:4] + 1, y.neg()

    check_declines(moves.slice_slice, model, specials(11, 3), USED_ELSEWHERE)


# ---- cat and its parts ------------------------------------------------------------------------------------

PARTS = {
    "inside": (lambda x, y: torch.cat([x, y])[1:2], "slice.Tensor"),
    "whole": (lambda x, y: torch.cat([x, y])[:2], ""),
    "second": (lambda x, y: torch.cat([x, y])[2:], ""),
    "inside second": (lambda x, y: torch.cat([x, y])[3:5], "slice.Tensor"),
    "step": (lambda x, y: torch.cat([x, y])[2:5:2], "slice.Tensor"),
    "index": (lambda x, y: torch.cat([x, y])[3], "select.int"),
    "index of one": (lambda x, y: torch.cat([x[:1], y])[0], "reshape"),
    "split": (lambda x, y: torch.cat([x, y]).split([2, 3])[1], ""),
    "unbind": (lambda x, y: torch.cat([x, y]).unbind()[4], "select.int"),
    "first axis of one": (lambda x, y: torch.cat([x.view(1, -1), y.view(1, -1)], 1)[:, :8], ""),
    "stack": (lambda x, y: torch.stack([x, x.neg()])[1], ""),
    "stack inside": (lambda x, y: torch.stack([x, x.neg(), x + 1]).unbind()[2], ""),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_joined_value_is_a_part_of_what_was_joined(name, dtype):
    model, op = PARTS[name]
    x, y = values(2, 4, dtype=dtype), values(3, 4, dtype=dtype)
    found = check(with_forms(moves.part_of_joined), lambda x, y: model(x, y).logical_not(), (x, y), exact=True)
    assert "part_of_joined" in found.done
    assert not {"cat", "stack"} & set(found.ops)
    assert op in ("", *found.ops)


def test_parts_of_a_value_used_elsewhere_are_taken_all_the_same():
    def model(x, y):
        both = torch.cat([x, y])
        return both.neg(), both[:2] + 1

    check_fires(moves.part_of_joined, model, (X, X), ops=["cat", "neg", "add.Tensor"])


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: torch.cat([x, y])[1:3],
        lambda x, y: torch.cat([x, y])[::2],
        lambda x, y: torch.cat([x, y], 1)[:1],
        lambda x, y: torch.cat([x, y.double()])[:2],
        lambda x, y: torch.cat([torch.zeros(0), x, y])[:2],
        lambda x, y: torch.stack([x, y])[:1],
        lambda x, y: torch.stack([x, y], 1)[0],
        lambda x, y: torch.stack([x, y.double()])[0],
        lambda x, y: torch.stack([x, y]).flatten()[:2],
        lambda x, y: torch.max(x, 0)[0],
    ],
)
def test_other_parts_stay(model):
    found = check(with_forms(moves.part_of_joined), lambda x, y: model(x, y) + 1, (X, X))
    assert "part_of_joined" not in found.done


def test_a_part_of_other_layout_stays():
    """A slice of the joined value strides over all of it."""
    found = check(moves.part_of_joined, lambda x, y: torch.cat([x, y], 1)[:, :3] + 1, (X, X))
    assert ("part_of_joined", OTHER_LAYOUT) in found.declined


def test_a_part_that_is_returned_is_no_input():
    check_declines(moves.part_of_joined, lambda x, y: torch.cat([x, y])[:2], (X, X), NEW_ALIAS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.cat([x, torch.cat([x + x, x])]),
        lambda x: torch.cat([torch.cat([x, x], 1), torch.cat([x, x + x], -2)], 1),
        lambda x: torch.cat([torch.cat([torch.cat([x, x], -1), x], -1), x], 2),
        lambda x: torch.cat([torch.cat([x, x])]),
    ],
)
def test_cat_cat_becomes_one(model, dtype):
    found = check_fires(moves.cat_cat, model, values(2, 3, 4, dtype=dtype), exact=True)
    assert found.ops.count("cat") == 1


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_cat_cat_of_nothing_becomes_one(shape):
    check_fires(moves.cat_cat, lambda x: torch.cat([x, torch.cat([x, x])]), torch.randn(shape), ops=["cat"])


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.cat([x, torch.cat([x, x], 1).reshape(4, 3, 4)]),
        lambda x: torch.cat([torch.cat([x, x], 1), torch.cat([x, x], 1)], 0),
        lambda x: torch.cat([x, torch.cat([x, x.half()])]),
        lambda x: torch.cat([x, torch.stack([x, x]).flatten(0, 1)]),
        lambda x: torch.cat([x, torch.cat([torch.zeros(0), x])]),
    ],
)
def test_other_cats_stay(model):
    check_declines(moves.cat_cat, model, X)


def test_promotions_inside_a_cat_stay():
    """int64 to float16 to float32 is not int64 to float32."""
    x = torch.tensor([70000, 2049])
    check_declines(moves.cat_cat, lambda x: torch.cat([torch.cat([x, x.half()]), x.float()]), x)


def test_a_cat_used_elsewhere_stays_one():
    def model(x):
        y = torch.cat([x, x])
        return y.neg(), torch.cat([x, y])

    check_declines(moves.cat_cat, model, X, moves.SHARED)


WHOLE = {
    "split": lambda x: torch.cat(x.split(2)),
    "split sizes": lambda x: torch.cat(x.split([1, 4, 2])),
    "chunk": lambda x: torch.cat(x.chunk(3)),
    "tensor_split": lambda x: torch.cat(x.tensor_split(3)),
    "slices": lambda x: torch.cat([x[:2], x[2:5], x[5:]]),
    "another axis": lambda x: torch.cat(x.t().split(2, 1), -1).t(),
    "empty": lambda x: torch.cat([x[:3], x[3:3], x[3:]]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_neighbours_that_make_the_whole_are_the_whole(name, dtype):
    x = values(7, 4, dtype=dtype)
    found = check(with_forms(moves.cat_neighbours), lambda x: WHOLE[name](x * x).logical_not(), x, exact=True)
    if name == "another axis":
        assert ("cat_neighbours", OTHER_LAYOUT) in found.declined
    else:
        assert "cat" not in found.ops
        assert "cat_neighbours" in found.done


def test_the_whole_is_the_whole_though_its_parts_are_used_elsewhere():
    def model(x):
        a, b = (x * 2).split([3, 4])
        return a.neg(), torch.cat([a, b]).relu()

    found = check_fires(moves.cat_neighbours, model, specials(7, 2))
    assert "cat" not in found.ops


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_become_one_slice(axis):
    def model(x, y):
        x = x.movedim(0, axis)
        parts = [x.narrow(axis, 0, 2), x.narrow(axis, 2, 3), y.movedim(0, axis)]
        return torch.cat(parts, axis)

    found = check(with_forms(moves.cat_neighbours), model, (specials(7, 3), specials(2, 3)), exact=True)
    assert "cat_neighbours" in found.done
    assert found.ops.count("slice.Tensor") == 1
    assert found.ops.count("cat") == 1


def test_neighbours_alone_become_one_slice_where_the_layout_is_the_same():
    found = check_fires(moves.cat_neighbours, lambda x: torch.cat([x[1:3], x[3:5]]) + 1, specials(7, 3))
    assert found.ops == ["slice.Tensor", "add.Tensor"]
    check_declines(
        moves.cat_neighbours, lambda x: torch.cat([x[:, :1], x[:, 1:2]], 1) + 1, specials(7, 3), OTHER_LAYOUT
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.cat([x[2:], x[:2]]),  # rotated
        lambda x: torch.cat([x[:3], x[2:]]),  # overlapping
        lambda x: torch.cat([x[:2], x[3:]]),  # with a gap
        lambda x: torch.cat([x[:2], (x + 1)[2:]]),
        lambda x: torch.cat([x[::2], x[1::2]]),
        lambda x: torch.cat([x[:2], x[2:4]], 1),
        lambda x: torch.cat([x[:2, :1], x[2:, :1]]),
        lambda x: torch.cat([x[:, :1], x[:, 1:]]) if x.shape[1] == 2 else x.neg(),
        lambda x: torch.cat(x.split(2)[::-1]),
        lambda x: torch.cat([x.select(0, 0), x.select(0, 1)]),
        lambda x: torch.cat([x.max(0, keepdim=True)[0], x[1:]]),
    ],
)
def test_other_neighbours_stay(model):
    check_declines(moves.cat_neighbours, lambda x: model(x) + 1, specials(7, 2))


def test_neighbours_used_elsewhere_stay():
    def model(x, y):
        a, b = x[:2], x[2:5]
        return a.neg(), torch.cat([a, b, y])

    check_declines(moves.cat_neighbours, model, (specials(7, 2), specials(2, 2)))


def test_a_whole_that_is_returned_is_no_input():
    check_declines(moves.cat_neighbours, lambda x: torch.cat([x[:2], x[2:]]), specials(7, 2), NEW_ALIAS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.stack(x.unbind()),
        lambda x: torch.stack(x.unbind(1), 1),
        lambda x: torch.stack([x[0], x[1], x[2]]),
        lambda x: torch.stack([x[:, 0], x[:, 1]], -2),
    ],
)
def test_a_stack_of_all_parts_is_the_whole(model, dtype):
    x = values(3, 2, 4, dtype=dtype)
    found = check_fires(moves.stack_unbind, lambda x: model(x).logical_not(), x, exact=True)
    assert "stack" not in found.ops


@pytest.mark.parametrize(
    "model",
    [
        lambda x: torch.stack([x[1], x[0], x[2]]),
        lambda x: torch.stack([x[0], x[1]]),
        lambda x: torch.stack([x[0], x[0], x[2]]),
        lambda x: torch.stack(x.unbind(1)),
        lambda x: torch.stack(x.unbind(), 1),
        lambda x: torch.stack([x[0], x[1], x[2].neg()]),
        lambda x: torch.stack([x[0].double(), x[1].double(), x[2].double()]),
        lambda x: torch.stack([x[:2], x[1:]]),
    ],
)
def test_other_stacks_stay(model):
    check_declines(moves.stack_unbind, lambda x: model(x) + 1, specials(3, 3, 3))


def test_a_stack_that_is_returned_is_no_input():
    check_declines(moves.stack_unbind, lambda x: torch.stack(x.unbind()), X, NEW_ALIAS)


def test_a_stack_of_a_transposed_value_is_dense_still():
    check_declines(moves.stack_unbind, lambda x: torch.stack(x.permute(2, 1, 0).unbind()) + 1, X, OTHER_LAYOUT)


# ---- scales -----------------------------------------------------------------------------------------------


class Layers(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.linear, self.conv = nn.Linear(4, 6), nn.Conv2d(3, 4, 1)
        self.up, self.table = nn.ConvTranspose2d(3, 4, 2), nn.Parameter(torch.randn(4, 6))
        self.eval()

    def forward(self, *xs):
        return self.function(self, *xs)


COUNTS = torch.arange(24).view(6, 4)  # as weights: no fraction can be folded into them
SCALES = {
    "linear": lambda m, x: m.linear(x).view(2, 3, 2, 3).transpose(1, 2) * 0.5,
    "linear div": lambda m, x: m.linear(x).permute(2, 0, 1) / 3,
    "conv": lambda m, x: m.conv(x.view(1, 3, 2, 4)).flatten(2).transpose(1, 2) * -2,
    "conv_transpose": lambda m, x: m.up(x.view(1, 3, 2, 4)).flatten(2) * 0.125,
    "matmul": lambda m, x: (x @ m.table).view(2, 3, 2, 3) * 0.5,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_goes_before_the_moves_with_the_same_bits(name, dtype):
    model, x = Layers(SCALES[name]).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    found = check(with_forms(moves.scale_before_moves), model, x, exact=True, also=[specials(2, 3, 4, dtype=dtype)])
    assert "scale_before_moves" in found.done
    layer = next(i for i, op in enumerate(found.ops) if op.startswith(("linear", "conv", "matmul")))
    assert found.ops[layer + 1].startswith(("mul", "div"))


@pytest.mark.parametrize("name", ["linear", "conv", "conv_transpose"])
def test_a_scale_before_the_moves_is_folded(name):
    """A batch of one has an axis less to stride over, and nothing changes the layout."""
    found = check((DeadCode(), NORMALIZE, MOVES, FUSE), Layers(SCALES[name]), torch.randn(2, 3, 4))
    assert "mul.Tensor" not in found.ops


@pytest.mark.parametrize(
    "model",
    [
        lambda m, x: m.linear(x) * 0.5,
        lambda m, x: m.linear(x).relu().transpose(1, 2) * 0.5,
        lambda m, x: m.linear(x).transpose(1, 2) * m.table[0, 0],
        lambda m, x: m.linear(x).transpose(1, 2) + 0.5,
        lambda m, x: m.linear(x).transpose(1, 2) * True,
        lambda m, x: (x @ x.mT).transpose(1, 2) * 0.5,
        lambda m, x: F.linear(x, m.table.t() * x[0, 0]).transpose(1, 2) * 0.5,
        lambda m, x: x.transpose(1, 2) * 0.5,
        lambda m, x: m.linear(x).transpose(1, 2)[:1] * 0.5,
        lambda m, x: F.linear(x.long(), COUNTS).transpose(1, 2) * 0.5,
    ],
)
def test_other_scales_stay(model):
    found = check(with_forms(moves.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert "scale_before_moves" not in found.done


def test_a_scale_of_a_shared_layer_stays():
    def model(m, x):
        y = m.linear(x)
        return y.transpose(1, 2) * 0.5, y + 1

    found = check(with_forms(moves.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert ("scale_before_moves", moves.SHARED) in found.declined


def test_a_scale_of_a_shared_move_stays():
    def model(m, x):
        y = m.linear(x).transpose(1, 2)
        return y * 0.5, y + 1

    found = check(with_forms(moves.scale_before_moves), Layers(model), torch.randn(2, 3, 4))
    assert "scale_before_moves" not in found.done


# ---- the table --------------------------------------------------------------------------------------------


def test_windows_made_and_put_together_again_are_gone():
    """Two reshapes and two permutes on the way there, as many on the way back."""

    def model(x):
        n, h, w, c = x.shape
        windows = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        back = windows.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return back.relu()

    check((NORMALIZE, MOVES), model, torch.randn(2, 4, 6, 3), ["relu"])


def test_images_made_tokens_and_images_again_are_reshaped_once():
    def model(x):
        tokens = x.permute(0, 2, 3, 1).flatten(1, 2)
        return tokens.transpose(1, 2).unflatten(2, (4, 5)).relu()

    check((NORMALIZE, MOVES), model, torch.randn(2, 3, 4, 5), ["relu"])


def test_exported_splits_stay_splits():
    def model(x):
        a, b = x.chunk(2, -1)
        return a * b.sigmoid()

    program = check((DeadCode(), NORMALIZE, MOVES), model, torch.randn(2, 4)).after
    assert ops_of(program) == ["chunk", "getitem", "getitem", "sigmoid", "mul.Tensor"]


def test_rules_work_together_and_come_to_rest():
    def model(x, y):
        both = torch.cat([x.transpose(0, 1).transpose(0, 1)[:2], x[2:], torch.cat([y, y.view(-1).view(3, 4)])])
        return both[:3].permute(1, 0).permute(1, 0) + y[:1].expand(3, 4) * both[3:6]

    found = check((DeadCode(), NORMALIZE, MOVES), model, (torch.randn(3, 4), torch.randn(3, 4)))
    assert set(found.ops) <= {"slice.Tensor", "mul.Tensor", "add.Tensor"}


def test_aten_names_of_splits_are_known():
    model = lambda x: torch.cat(list(aten.split.sizes(x * 2, [3, 4]))).relu()  # noqa: E731
    found = check((MOVES, DeadCode()), model, specials(7, 2))
    assert "cat" not in found.ops
