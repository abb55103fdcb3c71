"""Other strides of axes of size 1 go on to the values behind, or the rewrite is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.passes.helpers import ops_of
from tsopt.compiler.capture.capture import capture
from tsopt.compiler.graph.infer import infer_on
from tsopt.compiler.graph.ops import aten
from tsopt.compiler.graph.program import type_of, type_of_value
from tsopt.compiler.rewriting.pipeline import run
from tsopt.compiler.rewriting.rewrite import OTHER_LAYOUT_BEHIND, RulePass, rule

X = torch.randn(1, 5, 4)
WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4, 1, 1)


@rule(lambda x, dim: aten.unsqueeze.default(x, dim))
def as_reshape(at, x, dim):
    """unsqueeze(x, dim) -> reshape(x, ...), whose new axis has another stride"""
    return at.call(aten.reshape.default, x, list(at.type(at.root).shape))


PASSES = (RulePass("t", (as_reshape,)),)


def test_a_rewrite_that_would_change_the_layout_of_a_convolution_behind_is_left():
    program = capture(lambda x: F.conv2d(x.permute(0, 2, 1).unsqueeze(-1), WEIGHT), X)
    after, (record,) = run(program, PASSES)
    assert ops_of(after) == ["permute", "unsqueeze", "conv2d"]
    assert [item.reason for item in record.declined] == [OTHER_LAYOUT_BEHIND]


def test_an_op_behind_that_refuses_the_strides_keeps_the_rewrite_away():
    program = capture(lambda x: x.expand(3, 5, 4).unsqueeze(0).view(1, 3, 5, 2, 2), X)
    after, (record,) = run(program, PASSES)
    assert ops_of(after) == ["expand", "reshape", "view"]
    assert not record.failed


def joined(x):
    """One way to the sum is longer than the other one."""
    return (x.neg().abs().sin() + x).cos() * x


@pytest.mark.parametrize("behind", [lambda x: x.neg() * 2, joined], ids=["in a row", "on two ways"])
def test_strides_that_nobody_sees_are_recorded_on_all_values_behind(behind):
    program = capture(lambda x: behind(x.permute(0, 2, 1).unsqueeze(-1)).reshape(1, -1), X)
    after, _ = run(program, PASSES)
    assert "reshape" in ops_of(after)[1]
    for node in after.calls():
        derived = infer_on(after, node, lambda source: source.meta["val"])
        assert type_of_value(derived) == type_of(node), "to the last stride"


# ---- memory that is read by its place -----------------------------------------------------------------------


def first(x):
    return torch.as_strided(x, (2,), (1,), 1) * 2


def following(x):
    return torch.as_strided(x, (2, 2), (1, 1)) * 2


NUMBERS, BYTES = torch.arange(8.0), torch.arange(16, dtype=torch.uint8)
COPIES = {
    "clone": torch.clone,
    "pad": lambda x: F.pad(x, (0, 0)),
    "cat": lambda x: torch.cat([x]),
    "cast": lambda x: x.to(torch.float32, copy=True),
    "times one": lambda x: x * 1,
    "and then a view": lambda x: x.clone().view(2, 2),
}


READS = {
    "by strides": first,
    "by strides from where it is": following,
    "as complex numbers": lambda x: torch.view_as_complex(x.reshape(2, 2)) + 0,
    "as wider numbers": lambda x: x.reshape(-1).view(torch.float64) + 0,
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_copy_that_begins_elsewhere_stays_where_memory_is_read_by_its_place(copy, read):
    model = lambda x: read(copy(x[1:5]))  # noqa: E731
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, NUMBERS)), "eager")
    assert torch.equal(made(NUMBERS), model(NUMBERS))


def test_bytes_that_are_read_as_numbers_stay_where_they_are():
    model = lambda b: b[1:5].clone().view(torch.float32) + 0  # noqa: E731
    assert torch.equal(tsopt.compile(tsopt.transform(tsopt.capture(model, BYTES)), "eager")(BYTES), model(BYTES))


def test_what_is_read_beyond_a_part_stays_behind_it():
    model = lambda x: torch.as_strided(torch.cat([x.sin(), x.cos()])[8:], (2,), (1,), 9) * 2  # noqa: E731
    made = tsopt.compile(tsopt.transform(tsopt.capture(model, NUMBERS)), "eager")
    assert torch.equal(made(NUMBERS), model(NUMBERS))


def test_a_copy_goes_where_nothing_sees_its_place():
    program = tsopt.capture(lambda x: following(x[1:5].clone()), NUMBERS)
    assert "clone" not in ops_of(tsopt.transform(program))
    other = tsopt.capture(lambda x: first(x[1:].exp()) + x[2:4].clone(), NUMBERS)
    assert "clone" not in ops_of(tsopt.transform(other))
