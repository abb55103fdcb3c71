"""Which values may be infinite: by what writes infinities, passes them on, and ends them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tsopt.compiler.analysis.infinities import may_be_infinite

X, KEEP = torch.ones(2, 4, 8), torch.ones(2, 4, 8, dtype=torch.bool)
WEIGHT = torch.eye(8)
TABLE = torch.tensor([[0.0], [-math.inf]])
HIDING = torch.zeros(8).index_fill(0, torch.tensor([3]), -math.inf)


def verdict(model, *args):
    program = tsopt.capture(model, args)
    (output,) = program.outputs
    return may_be_infinite(program, output)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda x, k: x[1:].reshape(-1), True),
        (lambda x, k: F.linear(x, WEIGHT), False),
        (lambda x, k: F.linear(x, WEIGHT).masked_fill(k, -math.inf).relu() * 2, True),
        (lambda x, k: torch.where(k, 0.0, -math.inf), True),
        (lambda x, k: torch.where(k, 0.0, torch.finfo(torch.float32).min), False),
        (lambda x, k: k.float() * 2 - 1, False),
        (lambda x, k: x.softmax(-1) + HIDING, True),
        (lambda x, k: x.softmax(-1) + WEIGHT[0], False),
        (lambda x, k: k.float().log(), True),
        (lambda x, k: torch.xlogy(2.0, k.float()), True),
        (lambda x, k: torch.special.logit(k.float()), True),
        (lambda x, k: torch.special.xlog1py(2.0, -k.float()), True),
        (lambda x, k: torch.special.entr(-k.float()), True),
        (lambda x, k: torch.special.ndtri(k.float()), True),
        (lambda x, k: torch.digamma(k.float()), True),
        (lambda x, k: torch.polygamma(1, k.float()), True),
        (lambda x, k: torch.special.zeta(k.float(), 2.0), True),
        (lambda x, k: torch.special.bessel_y0(k.float()), True),
        (lambda x, k: x.sigmoid() // k.float(), True),
        (lambda x, k: torch.addcdiv(x.sigmoid(), x.sigmoid(), k.float()), True),
        (lambda x, k: k.float() / 2, False),
        (lambda x, k: k.float() // 2, False),
        (lambda x, k: 1 / k.float(), True),
        (lambda x, k: x.sigmoid() ** 2, False),
        (lambda x, k: x.sigmoid() ** -1, True),
        (lambda x, k: x.nan_to_num(), False),
        (lambda x, k: x.nan_to_num(0.0, math.inf), True),
        (lambda x, k: x.clamp(-1, 1), False),
        (lambda x, k: x.clamp(min=-1), True),
        (lambda x, k: k.float().clamp(HIDING, WEIGHT[0]), True),
        (lambda x, k: x.clamp(WEIGHT[0] - 1, WEIGHT[0]), False),
        (lambda x, k: x.clamp(WEIGHT[0] - 1, x[0, 0]), True),
        (lambda x, k: F.hardtanh(x, 0.0, math.inf), True),
        (lambda x, k: F.embedding(k.long(), TABLE), True),
        (lambda x, k: F.embedding(k.long(), WEIGHT), False),
        (lambda x, k: F.batch_norm(x, WEIGHT[0, :4], WEIGHT[0, :4]), True),
        (lambda x, k: F.batch_norm(k.float(), WEIGHT[0, :4], WEIGHT[0, :4]), False),
        (lambda x, k: x.long(), False),
        (lambda x, k: (k.int() * 2139095040).view(torch.float32), True),
        (lambda x, k: F.max_pool1d(k.float(), 2, 1, 1), False),
        (lambda x, k: F.max_pool1d(k.float(), 2, 1, 1, 2), True),
    ],
)
def test_which_values_may_be_infinite(model, expected):
    assert verdict(model, X, KEEP) is expected


@pytest.mark.parametrize(
    ("name", "other"),
    [
        (torch.xlogy, torch.special.xlogy),
        (torch.digamma, torch.special.psi),
        (torch.digamma, torch.special.digamma),
        (torch.lgamma, torch.special.gammaln),
        (torch.logit, torch.special.logit),
        (torch.log1p, torch.special.log1p),
        (torch.erfinv, torch.special.erfinv),
        (torch.atanh, torch.arctanh),
        (torch.div, torch.divide),
        (torch.div, torch.true_divide),
        (lambda x: torch.polygamma(1, x), lambda x: torch.special.polygamma(1, x)),
        (lambda x: torch.mvlgamma(x, 1), lambda x: torch.special.multigammaln(x, 1)),
        (torch.erf, torch.special.erf),
        (torch.sigmoid, torch.special.expit),
    ],
)
def test_a_second_name_of_an_op_says_the_same(name, other):
    two = {torch.xlogy: 2, torch.div: 2}.get(name, 1)
    known = verdict(lambda k: name(*[k.float()] * two), KEEP)
    assert known is (name not in (torch.erf, torch.sigmoid))
    assert verdict(lambda k: other(*[k.float()] * two), KEEP) is known
