"""Which inputs can make a value NaN or infinite: by op, and that none is overlooked in random programs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given

import tsopt
from tests.compiler.helpers import Net
from tests.passes.random_programs import programs
from tests.passes.test_random_programs import campaign, evaluate
from tsopt.compiler.analysis.non_finite import Harm, harmful_inputs

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.eye(8)
HIDING = torch.zeros(8).index_fill(0, torch.tensor([3]), -math.inf)
KINDS = {math.nan: Harm.NAN, math.inf: Harm.POSITIVE_INFINITY, -math.inf: Harm.NEGATIVE_INFINITY}


def harms(program):
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    found = harmful_inputs(program, output.all_input_nodes)
    return [found.get(node, Harm.NONE) for node in inputs]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda self, x: F.linear(x, WEIGHT), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.transpose(1, 2)[:, 1:].reshape(2, -1), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.relu(), Harm.POSITIVE_INFINITY),
        (lambda self, x: (-x).relu(), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.softmax(-1), Harm.POSITIVE_INFINITY),
        (lambda self, x: x.tanh(), Harm.NAN),
        (lambda self, x: x.clamp(-1, 1), Harm.NAN),
        (lambda self, x: x.clamp(min=-1), Harm.NEGATIVE_INFINITY),
        (lambda self, x: (x + x.flip(0)).tanh(), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.nan_to_num(), Harm.NONE),
        (lambda self, x: x.nan_to_num(posinf=math.inf), Harm.POSITIVE_INFINITY),
        (lambda self, x: x.nan_to_num(neginf=-math.inf), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.nan_to_num(math.nan), Harm.NAN),
        (lambda self, x: x.nan_to_num(neginf=-math.inf).relu(), Harm.NONE),
        (lambda self, x: x.nan_to_num(neginf=-math.inf).tanh(), Harm.NONE),
        (lambda self, x: x.clamp(0, math.inf), Harm.NEGATIVE_INFINITY),
        (lambda self, x: F.hardtanh(x, 0.0, math.inf), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.clamp(-WEIGHT[1].clone(), WEIGHT[0]), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.clamp(WEIGHT[1], WEIGHT[0]), Harm.NAN),
        (lambda self, x: x.clamp(HIDING, WEIGHT[0]), Harm.NEGATIVE_INFINITY),
        (lambda self, x: (x > 0).float(), Harm.NONE),
        (lambda self, x: torch.where(x > 0, 1.0, 2.0), Harm.NONE),
        (lambda self, x: x.masked_fill(x.isnan(), 0.0), Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.sort()[0], Harm.NEGATIVE_INFINITY),
        (lambda self, x: x.view(torch.float16).relu(), Harm.NEGATIVE_INFINITY),
    ],
    ids=["linear", "moved", "relu", "negated", "softmax", "tanh", "clamp", "one end", "inf - inf", "nan_to_num",
         "nan_to_num to inf", "nan_to_num to -inf", "nan_to_num to NaN", "-inf and relu", "-inf and tanh",
         "clamp at inf", "hardtanh at inf", "by computed ends", "by tensors", "by infinite tensors",
         "compared", "condition", "filled", "one of two results", "bits"],
)  # fmt: skip
def test_what_reaches_the_result(model, expected):
    assert harms(tsopt.capture(Net(model), X)) == [expected]


@pytest.mark.parametrize(
    "attention",
    [
        lambda self, x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
        lambda self, x, mask: ((x @ x.transpose(1, 2)) + mask).softmax(-1) @ x,
    ],
    ids=["fused", "written out"],
)
def test_a_mask_may_hold_negative_infinity(attention):
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf)
    assert harms(tsopt.capture(Net(attention), (X, mask))) == [Harm.NEGATIVE_INFINITY, Harm.POSITIVE_INFINITY]


def test_no_input_of_a_random_program_is_overlooked(fuzz_factor):
    looked = 0

    @campaign(60, fuzz_factor)
    @given(drawn=programs())
    def check(drawn):
        nonlocal looked
        finite = evaluate(drawn.program, drawn.inputs)
        known = harms(drawn.program)
        for position, value in enumerate(drawn.inputs):
            if not value.is_floating_point() or not value.numel():
                continue
            for bad, harm in KINDS.items():
                changed = [item.clone() for item in drawn.inputs]
                changed[position].view(-1)[0] = bad
                try:
                    found = evaluate(drawn.program, changed)
                except (RuntimeError, IndexError):
                    continue  # the model refuses these values
                pairs = [(a, b) for a, b in zip(found, finite, strict=True) if a.is_floating_point()]
                if any((~a.isfinite() & b.isfinite()).any() for a, b in pairs if a.shape == b.shape):
                    looked += 1
                    assert known[position] >= harm, drawn.program.text

    check()
    assert looked > 20
