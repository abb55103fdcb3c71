"""Other strides of axes of size 1 go on to the values behind, or the rewrite is left."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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


def test_strides_that_nobody_sees_are_recorded_on_all_values_behind():
    program = capture(lambda x: (x.permute(0, 2, 1).unsqueeze(-1).neg() * 2).reshape(1, -1), X)
    after, _ = run(program, PASSES)
    assert "reshape" in ops_of(after)[1]
    for node in after.calls():
        derived = infer_on(after, node, lambda source: source.meta["val"])
        assert type_of_value(derived) == type_of(node), "to the last stride"
