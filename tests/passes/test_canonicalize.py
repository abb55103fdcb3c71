"""One form for each thing; what does nothing in inference goes."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.helpers import (
    SPECIAL,
    Limits,
    RulePass,
    aten,
    capture,
    check,
    check_declines,
    check_fires,
    find,
    ops_of,
    passes_of,
    run,
    specials,
)
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT, USED_ELSEWHERE
from tsopt.passes import CANONICALIZE, DeadCode, canonicalize

N = len(SPECIAL)
X = specials(2, 3, 4)


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


# ---- names ------------------------------------------------------------------------------------------------

NAMES = {
    "sub.Tensor": [
        lambda x, y: torch.subtract(x, y),
        lambda x, y: aten.subtract.Scalar(x, 2),
        lambda x, y: aten.sub.Scalar(x, 2),
    ],
    "add.Tensor": [lambda x, y: aten.add.Scalar(x, 2)],
    "mul.Tensor": [
        lambda x, y: torch.multiply(x, y),
        lambda x, y: aten.multiply.Scalar(x, 2),
        lambda x, y: aten.mul.Scalar(x, 2),
    ],
    "div.Tensor": [
        lambda x, y: torch.divide(x, y),
        lambda x, y: torch.true_divide(x, y),
        lambda x, y: aten.divide.Scalar(x, 2),
        lambda x, y: aten.true_divide.Scalar(x, 2),
        lambda x, y: aten.div.Scalar(x, 2),
    ],
    "div.Tensor_mode": [lambda x, y: torch.divide(x, y, rounding_mode="floor")],
    "neg": [lambda x, y: torch.negative(x)],
    "abs": [lambda x, y: torch.absolute(x)],
    "trunc": [lambda x, y: torch.fix(x)],
    "atan": [lambda x, y: torch.arctan(x)],
    "atan2": [lambda x, y: torch.arctan2(x, y)],
    "sigmoid": [lambda x, y: torch.special.expit(x)],
    "erf": [lambda x, y: torch.special.erf(x)],
    "exp2": [lambda x, y: torch.special.exp2(x)],
    "expm1": [lambda x, y: torch.special.expm1(x)],
    "log1p": [lambda x, y: torch.special.log1p(x)],
    "softmax.int": [
        lambda x, y: torch.special.softmax(x, -1),
        lambda x, y: torch.special.softmax(x, 0, dtype=torch.float64),
    ],
    "log_softmax.int": [lambda x, y: torch.special.log_softmax(x, -1)],
    "cat": [lambda x, y: torch.concat([x, y]), lambda x, y: torch.concatenate([x, y], 1)],
    "clamp": [lambda x, y: torch.clip(x, 0, 1), lambda x, y: x.clip(max=1)],
    "clamp.Tensor": [lambda x, y: torch.clip(x, y)],
    "gt.Tensor": [lambda x, y: torch.greater(x, y)],
    "ge.Tensor": [lambda x, y: torch.greater_equal(x, y)],
    "lt.Tensor": [lambda x, y: torch.less(x, y)],
    "le.Tensor": [lambda x, y: torch.less_equal(x, y)],
    "ne.Tensor": [lambda x, y: torch.not_equal(x, y)],
    "gt.Scalar": [lambda x, y: torch.greater(x, 0.5)],
    "ge.Scalar": [lambda x, y: torch.greater_equal(x, 0.5)],
    "lt.Scalar": [lambda x, y: torch.less(x, 0.5)],
    "le.Scalar": [lambda x, y: torch.less_equal(x, 0.5)],
    "ne.Scalar": [lambda x, y: torch.not_equal(x, 0.5)],
}


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, models in NAMES.items() for model in models])
def test_an_op_has_one_name(name, model):
    x = specials(3, N)
    check_fires(canonicalize.short_name, model, (x, x.roll(5).contiguous()), ops=[name], exact=True)


@pytest.mark.parametrize("op", [aten.sub.Scalar, aten.subtract.Scalar, aten.add.Scalar], ids=str)
def test_a_scalar_overload_with_alpha_keeps_its_name(op):
    check_declines(canonicalize.short_name, lambda x: op(x, 2, 3), X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("op", [aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar], ids=str)
@pytest.mark.parametrize("literal", [3, 0.1, -0.0])
def test_both_overloads_promote_alike(op, literal, dtype):
    x = (torch.arange(18) if not dtype.is_floating_point else specials(N)).to(dtype)
    check_fires(canonicalize.short_name, lambda x: op(x, literal), x, exact=True)


@pytest.mark.parametrize("alpha", [{}, {"alpha": 3}])
def test_subtract_keeps_its_alpha(alpha):
    found = check(
        canonicalize.short_name, lambda x: torch.subtract(x, x.flip(0), **alpha), specials(N), ["flip", "sub.Tensor"]
    )
    assert ("alpha=3" in found.after.text) == bool(alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("op", "left", "right"),
    [
        (torch.mm, (3, 7), (7, 2)),
        (torch.mm, (1, 7), (7, 1)),
        (torch.mm, (0, 7), (7, 2)),
        (torch.mm, (2, 0), (0, 3)),
        (torch.bmm, (2, 3, 7), (2, 7, 3)),
        (torch.bmm, (1, 3, 7), (1, 7, 1)),
        (torch.bmm, (0, 3, 7), (0, 7, 3)),
        (torch.mv, (3, 7), (7,)),
        (torch.dot, (7,), (7,)),
    ],
)
def test_matrix_products_have_one_name(op, left, right, dtype):
    x, y = (torch.randn(shape).mul(5).to(dtype) for shape in (left, right))
    check_fires(canonicalize.short_name, lambda x, y: op(x, y), (x, y), ops=["matmul"], exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
def test_a_square_is_a_power(dtype):
    x = specials(N).nan_to_num(3, 2, 1).to(dtype)
    found = check_fires(canonicalize.square_power, lambda x: x.square(), x, ops=["pow.Tensor_Scalar"], exact=True)
    assert "aten.pow.Tensor_Scalar(%x, 2)" in found.after.text


@pytest.mark.parametrize("model", [lambda x: x * x, lambda x: x**2, lambda x: x.sqrt()])
def test_other_squares_stay(model):
    check_declines(canonicalize.square_power, model, X)


@pytest.mark.parametrize(
    ("op", "shape", "axis"),
    [(torch.hstack, (3,), 0), (torch.hstack, (3, 2), 1), (torch.vstack, (3, 2), 0), (torch.row_stack, (1, 2, 3), 0)],
)
@pytest.mark.filterwarnings("ignore")
def test_hstack_and_vstack_are_cat(op, shape, axis):
    found = check_fires(
        canonicalize.stack_cat, lambda x, y: op([x, y]), (torch.randn(shape), torch.randn(shape)), ops=["cat"]
    )
    assert f"], {axis})" in found.after.text


@pytest.mark.parametrize(("op", "shape"), [(torch.hstack, ()), (torch.vstack, (3,)), (torch.dstack, (3, 2, 1))])
def test_stacks_that_add_an_axis_stay(op, shape):
    check_declines(canonicalize.stack_cat, lambda x, y: op([x, y]), (torch.randn(shape), torch.randn(shape)))


def test_an_hstack_of_mixed_ranks_is_left_to_its_error():
    check_declines(canonicalize.stack_cat, lambda x, y: torch.hstack([x, y]), (torch.ones(1), torch.tensor(2.0)))


def test_an_hstack_with_an_empty_vector_keeps_the_axis_of_its_first_value():
    """Every vector goes along axis 0, and so does what comes after one; cat leaves the empty one out."""
    model = lambda x: torch.hstack([torch.zeros(0), x, x])  # noqa: E731
    found = check(canonicalize.stack_cat, model, torch.ones(2, 3))
    assert found.done == set()


# ---- casts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize(
    "op",
    [
        lambda x: aten._to_copy.default(x, dtype=torch.float16),
        lambda x: aten.to.dtype_layout(x, dtype=torch.float16, layout=torch.strided, device=torch.device("cpu")),
        lambda x: aten.to.device(x, torch.device("cpu"), torch.float16),
        lambda x: aten.to.dtype(x, torch.float16, False, True),
        lambda x: aten.to.dtype(x, torch.float16, memory_format=torch.preserve_format),
        lambda x: aten.type_as.default(x, x.flatten().half()),
        lambda x: aten.to.other(x, x.flatten().half()),
        lambda x: x.half(),
    ],
)
def test_a_cast_has_one_form(op, source):
    x = (specials(3, N) if source.is_floating_point else torch.arange(-1, 5).reshape(2, 3)).to(source)
    found = check((DeadCode(), CANONICALIZE, DeadCode("again")), op, x, ["to.dtype"])
    assert "aten.to.dtype(%x, float16)" in found.after.text
    assert found.after.numerics == Numerics.EXACT


@pytest.mark.parametrize("op", [lambda x: x.half(), lambda x: x.view(torch.int32), lambda x: x.long() + 1])
def test_a_cast_in_its_form_stays(op):
    check_declines(canonicalize.cast_form, op, X)


def test_a_cast_to_the_same_type_has_no_form():
    check_declines(canonicalize.cast_form, lambda x: aten._to_copy.default(x, dtype=torch.float32).neg(), X)


def test_a_cast_to_another_device_stays():
    program = capture(lambda x: x.to("meta", torch.float16), X)
    changes = RulePass("casts", (canonicalize.cast_form,)).run(program, Limits())
    assert changes.done == changes.declined == ()


def test_a_cast_into_another_layout_stays():
    x = torch.randn(1, 2, 3, 3)
    check_declines(
        canonicalize.cast_form,
        lambda x: aten._to_copy.default(x, dtype=torch.float64, memory_format=torch.channels_last).neg(),
        x,
        OTHER_LAYOUT,
    )


# ---- moves ------------------------------------------------------------------------------------------------

RESHAPES = {
    "view": lambda x: x.view(4, -1),
    "_unsafe_view": lambda x: aten._unsafe_view.default(x, [4, 6]),
    "reshape": lambda x: x.reshape(-1, 4),
    "view_as": lambda x: x.view_as(x.new_zeros(4, 6)),
    "reshape_as": lambda x: x.reshape_as(x.new_zeros(4, 6)),
    "flatten": lambda x: x.flatten(1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.squeeze(),
    "squeeze_dim": lambda x: x.squeeze(1),
    "squeeze_dims": lambda x: x.squeeze((1, 2)),
    "atleast_3d": lambda x: torch.atleast_3d(x.select(2, 1).select(2, 0)),
    "select": lambda x: x.select(1, -1),
    "expand": lambda x: x.expand(1, *x.shape),
    "expand_as": lambda x: x.expand_as(x.new_zeros(1, 2, 1, 3, 4)),
    "broadcast_to": lambda x: x.broadcast_to(1, *x.shape),
    "repeat": lambda x: x.repeat(1, 1, 1, 1, 1),
    "tile": lambda x: x.tile(1, 1, 1, 1, 1),
}


@pytest.mark.sliced(38)
@pytest.mark.parametrize("name", RESHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool], ids=str)
def test_a_change_of_shape_alone_is_a_reshape(name, dtype):
    x = specials(2, 1, 3, 4, dtype=dtype) if dtype.is_floating_point else torch.arange(24).reshape(2, 1, 3, 4).to(dtype)
    found = check(CANONICALIZE, lambda x: RESHAPES[name](x).expm1(), x, exact=True)
    assert [op for op in found.ops if op not in ("select.int", "new_zeros", "zeros")] == ["reshape", "expm1"]
    assert "reshape_form" in found.done


@pytest.mark.parametrize("shape", [(0, 1, 3, 4), (1, 1, 1, 1), (7, 1, 0, 2)])
@pytest.mark.parametrize(
    "name", ["flatten", "ravel", "unsqueeze", "squeeze", "squeeze_dim", "select", "expand", "repeat"]
)
def test_a_change_of_shape_alone_is_a_reshape_in_any_shape(name, shape):
    check(CANONICALIZE, lambda x: RESHAPES[name](x).neg(), torch.randn(shape), ["reshape", "neg"])


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.reshape(4, 6).neg(),
        lambda x: x.reshape(4, -1).view(torch.int32),
        lambda x: x.select(0, 1).neg(),
        lambda x: x.expand(5, *x.shape).neg(),
        lambda x: x.repeat(2, 1, 1, 1).neg(),
        lambda x: x.permute(3, 0, 1, 2).neg(),
    ],
)
def test_what_is_no_reshape_of_another_form_stays(model):
    found = check(canonicalize.reshape_form, model, specials(2, 1, 3, 4))
    assert found.declined == set(), "no near miss: reshape would refuse another number of elements"
    assert [op.split(".")[0] for op in found.ops] == [op.split(".")[0] for op in ops_of(found.before)]


def test_a_returned_view_stays_a_view_and_a_copy_a_copy():
    """repeat copies; a reshape in its place would return the memory of the input."""
    check_declines(canonicalize.reshape_form, lambda x: x.repeat(1, 1, 1, 1), X, NEW_ALIAS)
    check_fires(canonicalize.reshape_form, lambda x: x.flatten(), X, ops=["reshape"])


def test_a_flatten_that_copies_is_a_reshape_that_copies():
    check_fires(
        canonicalize.reshape_form,
        lambda x: x.transpose(0, 2).flatten().neg(),
        X,
        ops=["transpose.int", "reshape", "neg"],
    )


def test_a_repeat_of_an_expanded_value_stays_dense():
    check_declines(
        canonicalize.reshape_form, lambda x: x.expand(3, 2, 4).repeat(1, 1, 1, 1).neg(), specials(1, 2, 4), OTHER_LAYOUT
    )


@pytest.mark.parametrize(
    "model",
    [lambda x: x.expand(-1, 5, -1), lambda x: x.broadcast_to(2, 5, 4), lambda x: x.expand_as(x.new_zeros(2, 5, 4))],
)
def test_an_expand_has_one_form(model):
    found = check(CANONICALIZE, lambda x: model(x).neg(), specials(2, 1, 4))
    assert "aten.expand(%x, [2, 5, 4])" in found.after.text
    assert found.after.numerics == Numerics.EXACT


@pytest.mark.parametrize("model", [lambda x: x.expand(2, 5, 4), lambda x: x.repeat(1, 5, 1), lambda x: x.neg()])
def test_an_expand_in_its_form_stays(model):
    check_declines(canonicalize.expand_form, model, specials(2, 1, 4))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda x: x[:, :, 1:], "(%x, 2, 1, 4)"),
        (lambda x: x[:, :, -2:], "(%x, 2, 2, 4)"),
        (lambda x: x[:, -9:2], "(%x, 1, 0, 2)"),
        (lambda x: x[..., :-1], "(%x, 2, 0, 3)"),
        (lambda x: x[..., 1:9:2], "(%x, 2, 1, 4, 2)"),
        (lambda x: x[..., 3:1], "(%x, 2, 3, 3)"),
        (lambda x: aten.slice.Tensor(x, -2, None, -1), "(%x, 1, 0, 2)"),
        (lambda x: x.narrow(-1, -3, 2), "(%x, 2, 1, 3)"),
        (lambda x: x.narrow(0, 1, 1), "(%x, 0, 1, 2)"),
        (lambda x: x.narrow(1, 3, 0), "(%x, 1, 3, 3)"),
        (lambda x: x.narrow(1, -3, 0), "(%x, 1, 0, 0)"),
    ],
)
def test_a_slice_has_static_bounds(model, text):
    found = check(CANONICALIZE, lambda x: model(x).neg(), X, ["slice.Tensor", "neg"], exact=True)
    assert f"aten.slice.Tensor{text}" in found.after.text


@pytest.mark.parametrize(
    "model",
    [lambda x: aten.slice.Tensor(x, 1, 1, 3), lambda x: aten.slice.Tensor(x, 2, 0, 4, 2), lambda x: x.select(1, 1)],
)
def test_a_slice_in_its_form_stays(model):
    check_declines(canonicalize.slice_form, lambda x: model(x).neg(), X)


PERMUTES = [
    (lambda x: x.transpose(0, -1), [2, 1, 0]),
    (lambda x: x.swapaxes(-1, 1), [0, 2, 1]),
    (lambda x: x.swapdims(0, 1), [1, 0, 2]),
    (lambda x: x.mT, [0, 2, 1]),
    (lambda x: x.movedim(0, -1), [1, 2, 0]),
    (lambda x: x.movedim((0, 1), (-1, 0)), [1, 2, 0]),
    (lambda x: x.moveaxis(2, 0), [2, 0, 1]),
    (lambda x: x.moveaxis((2, 0), (0, 2)), [2, 1, 0]),
    (lambda x: x.permute(-1, 0, 1), [2, 0, 1]),
    (lambda x: aten.numpy_T.default(x), [2, 1, 0]),
]


@pytest.mark.parametrize("shape", [(2, 3, 4), (3, 3, 3), (1, 7, 2), (0, 2, 3)])
@pytest.mark.parametrize(("model", "axes"), PERMUTES)
@pytest.mark.filterwarnings("ignore")
def test_a_change_of_axes_is_a_permute(model, axes, shape):
    found = check_fires(
        canonicalize.permute_form, lambda x: model(x).neg(), specials(*shape), ops=["permute", "neg"], exact=True
    )
    assert f"aten.permute(%x, {axes})" in found.after.text


def test_a_transposed_matrix_is_a_permute():
    check_fires(
        canonicalize.permute_form,
        lambda x: (x.t() + 1, x.T * 2),
        X[0],
        ops=["permute", "add.Tensor", "permute", "mul.Tensor"],
    )


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda x: x.transpose(1, -2), (2, 3, 4)),
        (lambda x: x.permute(0, -2, 2), (2, 3, 4)),
        (lambda x: x.movedim(1, 1), (2, 3, 4)),
        (lambda x: x.t(), (3,)),
        (lambda x: x.t(), ()),
        (lambda x: x.permute(()), ()),
        (lambda x: x.transpose(0, -1), ()),
        (lambda x: x.movedim(0, 0), ()),
    ],
)
def test_a_permute_that_moves_nothing_goes(model, shape):
    check_fires(canonicalize.permute_form, lambda x: model(x) + 1, torch.ones(shape), ops=["add.Tensor"])


@pytest.mark.parametrize("model", [lambda x: x.permute(2, 0, 1), lambda x: x.flip(0), lambda x: x.reshape(4, 3, 2)])
def test_a_permute_in_its_form_stays(model):
    """A permute of a cube changes no shape, and moves the values."""
    check_declines(canonicalize.permute_form, model, X)
    check_declines(canonicalize.permute_form, lambda x: x.permute(1, 2, 0) + 1, specials(3, 3, 3))


# ---- pads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 0.0, 2.5, -3, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_a_constant_pad_has_one_form(value, dtype):
    if value != value // 1 and not dtype.is_floating_point:
        return
    check_fires(
        canonicalize.pad_form,
        lambda x: aten.constant_pad_nd.default(x, [1, 0], value),
        X.nan_to_num(1, 2, 3).clamp(-9, 9).to(dtype),
        ops=["pad"],
    )


@pytest.mark.parametrize(
    "model", [lambda x: F.pad(x, (1, 1)), lambda x: F.pad(x, (1, 1), "reflect"), lambda x: x.neg()]
)
def test_other_pads_stay(model):
    check_declines(canonicalize.pad_form, model, X)


def test_a_pad_with_a_value_that_no_float_holds_stays():
    check_declines(canonicalize.pad_form, lambda x: aten.constant_pad_nd.default(x, [1, 0], 2**53 + 1), torch.arange(3))


def test_the_forms_come_to_rest_in_any_order():
    """What one rule makes is the form of every other."""

    def model(x):
        y = torch.multiply(x, 2).transpose(0, 1).flatten(1).unsqueeze(0).expand(3, -1, -1)
        return torch.concat([y.narrow(2, 0, 3).mT, y[..., 1:].movedim(1, 2).float()], -1).squeeze().square()

    found = check((DeadCode(), CANONICALIZE), model, specials(2, 3, 2))
    forms = {"mul.Tensor", "permute", "reshape", "expand", "slice.Tensor", "cat", "pow.Tensor_Scalar"}
    assert set(found.ops) == forms


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "dilation", "padding", "expected"),
    [(3, 1, "same", 1), (5, 1, "same", 2), (3, 2, "same", 2), (1, 1, "same", 0), (2, 2, "same", 1), (4, 1, "valid", 0)],
)
def test_padding_by_name_is_padding_by_number(dims, kernel, dilation, padding, expected):
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](2, 3, kernel, padding=padding, dilation=dilation).eval()
    found = check_fires(canonicalize.padding_form, conv, torch.randn(1, 2, *[7] * dims), ops=[f"conv{dims}d"])
    assert list(find(found.after, f"conv{dims}d").args[4]) == [expected] * dims


@pytest.mark.parametrize("kernel", [2, 4, (3, 2)])
def test_padding_that_is_not_the_same_on_both_sides_keeps_its_name(kernel):
    conv = nn.Conv2d(2, 3, kernel, padding="same").eval()
    check(canonicalize.padding_form, conv, torch.randn(1, 2, 7, 7), ["conv2d.padding"])
