"""One form for casts, moves and pads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.passes.examples import N, X
from tests.passes.helpers import (
    Limits,
    RulePass,
    aten,
    capture,
    check,
    check_declines,
    check_fires,
    find,
    ops_of,
    specials,
)
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.rewrite import NEW_ALIAS, OTHER_LAYOUT
from tsopt.passes import CANONICALIZE, DeadCode, canonicalize

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


def test_a_pad_with_a_value_that_wraps_around_stays():
    """-1 is 255 in uint8, and -1.0 is an error."""
    x = torch.arange(4, dtype=torch.uint8)
    check_declines(
        canonicalize.pad_form, lambda x: aten.constant_pad_nd.default(x, [1, 1], -1) + 0, x, canonicalize.WRAPS
    )


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
