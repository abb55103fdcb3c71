"""One form for each thing; what does nothing in inference goes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F

from tests.passes.examples import X
from tests.passes.helpers import (
    Limits,
    aten,
    capture,
    check,
    check_declines,
    check_fires,
    ops_of,
    passes_of,
    run,
)
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE
from tsopt.passes import CANONICALIZE, DeadCode, canonicalize


def test_every_rule_is_exact_and_has_an_equation():
    assert all(item.numerics == Numerics.EXACT and "->" in item.doc for item in canonicalize.RULES)


class Norm(torch.nn.Module):
    def __init__(self, used: int = 0) -> None:
        super().__init__()
        self.used = used
        for name in ("w", "b", "mean"):
            self.register_buffer(name, torch.randn(3))
        self.register_buffer("var", torch.rand(3) + 0.5)

    def forward(self, x):
        found = aten._native_batch_norm_legit_no_training.default(x, self.w, self.b, self.mean, self.var, 0.1, 1e-5)
        return (found[0], found[1]) if self.used else found[0]


def test_the_inference_batch_norm_gets_one_form():
    found = check((DeadCode(), CANONICALIZE), Norm(), X, ["batch_norm"])
    assert found.after.numerics == Numerics.EXACT


def test_the_inference_batch_norm_whose_statistics_are_used_stays():
    found = check(canonicalize.batch_norm_inference, Norm(used=1), X)
    assert ("batch_norm_inference", USED_ELSEWHERE) in found.declined


@pytest.mark.parametrize(
    "op", [aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout], ids=str
)
@pytest.mark.parametrize(("p", "train"), [(0.5, False), (0.0, True), (1.0, False)])
def test_dropout_that_drops_nothing_goes(op, p, train):
    check_fires(canonicalize.dropout_eval, lambda x: op.default(x, p, train).neg(), X, ops=["neg"])


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_an_active_dropout_stays(p):
    program = capture(lambda x: F.dropout(x, p, True).neg(), X)
    after, records = run(program, passes_of(canonicalize.dropout_eval), Limits())
    assert ops_of(after) == ops_of(program)
    assert "dropout is active" in {item.reason for item in records[0].declined}


def test_dropout_over_the_input_is_the_input_in_eager_too():
    """F.dropout in eval returns its argument: no new alias."""
    check_fires(canonicalize.dropout_eval, lambda x: F.dropout(x, 0.5, False), X, ops=[])


@pytest.mark.parametrize(
    "op",
    [
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        lambda x: x.clone(memory_format=torch.contiguous_format),
    ],
)
def test_a_copy_goes(op):
    found = check(canonicalize.copy_of_value, lambda x: op(x).neg(), X, ["neg"])
    assert found.after.numerics == Numerics.EXACT


def test_a_clone_that_is_returned_stays():
    check_declines(canonicalize.copy_of_value, lambda x: x.clone(), X, NEW_ALIAS)


def test_a_clone_of_a_weight_that_is_returned_stays():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.w.clone(), x + self.w

    check_declines(canonicalize.copy_of_value, Net(), torch.ones(3), NEW_ALIAS)


def test_one_of_two_returned_clones_stays():
    def model(x):
        y = x.neg()
        return y.clone(), y.clone()

    found = check(canonicalize.copy_of_value, model, X)
    assert found.ops.count("clone") == 1


def test_a_copy_into_another_layout_stays():
    check_declines(canonicalize.copy_of_value, lambda x: x.transpose(0, 2).contiguous().neg(), X, OTHER_LAYOUT)
    check_declines(
        canonicalize.copy_of_value,
        lambda x: x.contiguous(memory_format=torch.channels_last).neg(),
        torch.randn(1, 2, 3, 3),
        OTHER_LAYOUT,
    )


@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten.to.dtype(x, torch.float32),
        lambda x: aten._to_copy.default(x, dtype=torch.float32),
        lambda x: aten._to_copy.default(x),
        lambda x: aten.to.dtype_layout(x, dtype=torch.float32, layout=torch.strided, device=torch.device("cpu")),
        lambda x: aten.to.device(x, torch.device("cpu"), torch.float32),
        lambda x: aten.type_as.default(x, torch.zeros(1)),
        lambda x: aten.to.dtype(x, torch.float32, False, True),
    ],
)
def test_a_cast_to_its_own_type_goes(op):
    found = check(CANONICALIZE, lambda x: op(x).neg(), X)
    assert [name for name in found.ops if not name.startswith("_assert") and name not in ("zeros", "full")] == ["neg"]


def test_a_cast_to_another_type_stays():
    check_declines(canonicalize.cast_to_same, lambda x: aten.to.dtype(x, torch.float64).neg(), X)


def test_a_forced_copy_that_is_returned_stays():
    """to(copy=True) never returns its argument, whatever its schema says."""
    check_declines(canonicalize.cast_to_same, lambda x: aten.to.dtype(x, torch.float32, False, True), X, NEW_ALIAS)


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.expand(2, 3, 4),
        lambda x: x.expand(-1, -1, 4),
        lambda x: aten.expand_as.default(x, x),
        lambda x: x.view(2, 3, 4),
        lambda x: x.view(2, -1, 4),
        lambda x: aten._unsafe_view.default(x, [2, 3, 4]),
        lambda x: aten.reshape.default(x, [2, 3, 4]),
        lambda x: x.flatten(1, 1),
        lambda x: x.squeeze(),
        lambda x: x.squeeze(1),
        lambda x: x.squeeze((0, 1)),
        lambda x: aten.slice.Tensor(x, 1, 0, 9223372036854775807),
        lambda x: aten.slice.Tensor(x, 1, -3, 3, 1),
        lambda x: aten.narrow.default(x, 1, 0, 3),
        lambda x: x.repeat(1, 1, 1),
    ],
)
def test_a_move_to_the_shape_at_hand_goes(op):
    check_fires(canonicalize.same_shape, lambda x: op(x).neg(), X, ops=["neg"])


@pytest.mark.parametrize(
    "op",
    [
        lambda x: x.view(3, 2, 4),
        lambda x: x.expand(1, 2, 3, 4),
        lambda x: aten.slice.Tensor(x, 1, 0, 2),
        lambda x: aten.slice.Tensor(x, 2, 0, 4, 2),
        lambda x: x.repeat(1, 2, 1),
        lambda x: x.flatten(0, 1),
        lambda x: aten.narrow.default(x, 1, 1, 2),
    ],
)
def test_a_move_to_another_shape_stays(op):
    check_declines(canonicalize.same_shape, lambda x: op(x).neg(), X)


def test_a_repeat_that_is_returned_stays():
    """repeat copies: without it the output would be the input."""
    check_declines(canonicalize.same_shape, lambda x: x.repeat(1, 1, 1), X, NEW_ALIAS)


def test_a_repeat_of_a_transposed_value_stays_dense():
    check_declines(canonicalize.same_shape, lambda x: x.transpose(0, 2).repeat(1, 1, 1).neg(), X, OTHER_LAYOUT)


def test_a_view_of_other_dtype_is_no_move():
    check_declines(canonicalize.same_shape, lambda x: x.view(torch.int32).neg(), X)


@pytest.mark.parametrize(
    "op",
    [lambda x: F.pad(x, (0, 0)), lambda x: F.pad(x, (0, 0, 0, 0), value=3.0), lambda x: F.pad(x, (0, 0), "reflect")],
)
def test_a_pad_of_nothing_goes(op):
    found = check(canonicalize.pad_nothing, lambda x: op(x).neg(), X, ["neg"])
    assert found.after.numerics == Numerics.EXACT


@pytest.mark.parametrize("pad", [(0, 1), (1, -1), (-1, 0)])
def test_a_pad_of_something_stays(pad):
    check_declines(canonicalize.pad_nothing, lambda x: F.pad(x, pad).neg(), X)


def test_a_pad_of_nothing_that_is_returned_stays():
    check_declines(canonicalize.pad_nothing, lambda x: aten.constant_pad_nd.default(x, [0, 0], 0.0), X, NEW_ALIAS)


def test_cat_of_one_goes():
    check_fires(canonicalize.cat_of_one, lambda x: torch.cat([x], 1).neg(), X, ops=["neg"])


def test_cat_of_two_stays():
    check_declines(canonicalize.cat_of_one, lambda x: torch.cat([x, x], 1).neg(), X)


def test_cat_of_one_that_is_returned_stays():
    check_declines(canonicalize.cat_of_one, lambda x: torch.cat([x]), X, NEW_ALIAS)


def test_getitem_of_other_results_is_no_batch_norm():
    check_declines(canonicalize.batch_norm_inference, lambda x: operator.getitem(x.split(1, 0), 0).neg(), X)
