"""Slices, joined values and their parts: where they are one, and where they only seem to."""

from __future__ import annotations

import pytest
import torch

from tests.passes.helpers import SPECIAL, check, check_declines, check_fires, of_any_dtype, specials
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE, RulePass
from tsopt.passes import CANONICALIZE, DeadCode, slices

N = len(SPECIAL)
DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool]
X = specials(2, 3, 4)


def with_forms(item):
    """The rule after the forms it is written for."""
    return (DeadCode(), CANONICALIZE, RulePass(item.name, (item,)), DeadCode("dce-again"))


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
    x = of_any_dtype(11, 3, dtype=dtype)
    found = check(with_forms(slices.slice_slice), lambda x: SLICES[name](x).logical_not(), x, exact=True)
    assert [op for op in found.ops if op in ("slice.Tensor", "select.int")] == [
        "select.int" if name.startswith("index") else "slice.Tensor"
    ]


def test_slices_of_every_size_are_taken_right():
    spans = [(a, b, s) for a in (0, 1, 3) for b in (0, 2, 5, 7) for s in (1, 2, 3)]

    def model(x):
        return tuple(x[a:b:s][c:d:t] + 1 for a, b, s in spans[::4] for c, d, t in spans[::5])

    check(with_forms(slices.slice_slice), model, torch.arange(7.0), exact=True)


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
    check_declines(slices.slice_slice, lambda x: model(x) + 1, specials(11, 3))


def test_slices_with_a_shared_middle_stay():
    def model(x):
        y = x[2:9]
        return y[1:4] + 1, y.neg()

    check_declines(slices.slice_slice, model, specials(11, 3), USED_ELSEWHERE)


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
    x, y = of_any_dtype(2, 4, dtype=dtype), of_any_dtype(3, 4, dtype=dtype)
    found = check(with_forms(slices.part_of_joined), lambda x, y: model(x, y).logical_not(), (x, y), exact=True)
    assert "part_of_joined" in found.done
    assert not {"cat", "stack"} & set(found.ops)
    assert op in ("", *found.ops)


def test_parts_of_a_value_used_elsewhere_are_taken_all_the_same():
    def model(x, y):
        both = torch.cat([x, y])
        return both.neg(), both[:2] + 1

    check_fires(slices.part_of_joined, model, (X, X), ops=["cat", "neg", "add.Tensor"])


@pytest.mark.parametrize(
    "model",
    [
        lambda x, y: torch.cat([x, y])[1:3],
        lambda x, y: torch.cat([x, y])[::2],
        lambda x, y: torch.cat([x, y], 1)[:1],
        lambda x, y: torch.cat([x, y.double()])[:2],
        lambda x, y: torch.cat([torch.zeros(0), x, y])[:2],
        lambda x, y: torch.stack([x, y])[:1],
        lambda x, y: torch.stack([x, y])[2:],
        lambda x, y: torch.stack([x, y], 1)[0],
        lambda x, y: torch.stack([x, y.double()])[0],
        lambda x, y: torch.stack([x, y]).flatten()[:2],
        lambda x, y: torch.max(x, 0)[0],
    ],
)
def test_other_parts_stay(model):
    found = check(with_forms(slices.part_of_joined), lambda x, y: model(x, y) + 1, (X, X))
    assert "part_of_joined" not in found.done


def test_a_part_of_other_layout_stays():
    """A slice of the joined value strides over all of it."""
    found = check(slices.part_of_joined, lambda x, y: torch.cat([x, y], 1)[:, :3] + 1, (X, X))
    assert ("part_of_joined", OTHER_LAYOUT) in found.declined


def test_a_part_that_is_returned_is_no_input():
    check_declines(slices.part_of_joined, lambda x, y: torch.cat([x, y])[:2], (X, X), NEW_ALIAS)


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
    found = check_fires(slices.cat_cat, model, of_any_dtype(2, 3, 4, dtype=dtype), exact=True)
    assert found.ops.count("cat") == 1


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_cat_cat_of_nothing_becomes_one(shape):
    check_fires(slices.cat_cat, lambda x: torch.cat([x, torch.cat([x, x])]), torch.randn(shape), ops=["cat"])


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
    check_declines(slices.cat_cat, model, X)


def test_promotions_inside_a_cat_stay():
    """int64 to float16 to float32 is not int64 to float32."""
    x = torch.tensor([70000, 2049])
    check_declines(slices.cat_cat, lambda x: torch.cat([torch.cat([x, x.half()]), x.float()]), x)


def test_a_cat_used_elsewhere_stays_one():
    def model(x):
        y = torch.cat([x, x])
        return y.neg(), torch.cat([x, y])

    check_declines(slices.cat_cat, model, X, slices.SHARED)


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
    x = of_any_dtype(7, 4, dtype=dtype)
    found = check(with_forms(slices.cat_neighbours), lambda x: WHOLE[name](x * x).logical_not(), x, exact=True)
    if name == "another axis":
        assert ("cat_neighbours", OTHER_LAYOUT) in found.declined
    else:
        assert "cat" not in found.ops
        assert "cat_neighbours" in found.done


def test_the_whole_is_the_whole_though_its_parts_are_used_elsewhere():
    def model(x):
        a, b = (x * 2).split([3, 4])
        return a.neg(), torch.cat([a, b]).relu()

    found = check_fires(slices.cat_neighbours, model, specials(7, 2))
    assert "cat" not in found.ops


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbours_become_one_slice(axis):
    def model(x, y):
        x = x.movedim(0, axis)
        parts = [x.narrow(axis, 0, 2), x.narrow(axis, 2, 3), y.movedim(0, axis)]
        return torch.cat(parts, axis)

    found = check(with_forms(slices.cat_neighbours), model, (specials(7, 3), specials(2, 3)), exact=True)
    assert "cat_neighbours" in found.done
    assert found.ops.count("slice.Tensor") == 1
    assert found.ops.count("cat") == 1


def test_neighbours_alone_become_one_slice_where_the_layout_is_the_same():
    found = check_fires(slices.cat_neighbours, lambda x: torch.cat([x[1:3], x[3:5]]) + 1, specials(7, 3))
    assert found.ops == ["slice.Tensor", "add.Tensor"]
    check_declines(
        slices.cat_neighbours, lambda x: torch.cat([x[:, :1], x[:, 1:2]], 1) + 1, specials(7, 3), OTHER_LAYOUT
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
    check_declines(slices.cat_neighbours, lambda x: model(x) + 1, specials(7, 2))


def test_neighbours_used_elsewhere_stay():
    def model(x, y):
        a, b = x[:2], x[2:5]
        return a.neg(), torch.cat([a, b, y])

    check_declines(slices.cat_neighbours, model, (specials(7, 2), specials(2, 2)))


def test_a_whole_that_is_returned_is_no_input():
    check_declines(slices.cat_neighbours, lambda x: torch.cat([x[:2], x[2:]]), specials(7, 2), NEW_ALIAS)


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
    x = of_any_dtype(3, 2, 4, dtype=dtype)
    found = check_fires(slices.stack_unbind, lambda x: model(x).logical_not(), x, exact=True)
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
    check_declines(slices.stack_unbind, lambda x: model(x) + 1, specials(3, 3, 3))


def test_a_stack_that_is_returned_is_no_input():
    check_declines(slices.stack_unbind, lambda x: torch.stack(x.unbind()), X, NEW_ALIAS)


def test_a_stack_of_a_transposed_value_is_dense_still():
    check_declines(slices.stack_unbind, lambda x: torch.stack(x.permute(2, 1, 0).unbind()) + 1, X, OTHER_LAYOUT)
