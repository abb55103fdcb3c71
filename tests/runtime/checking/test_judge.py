"""The verdict at all sizes."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import example
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.criterion import criterion_of
from tsopt.runtime.checking.held_out_sizes import validate_ranges
from tsopt.runtime.checking.judge import Judge


def test_a_candidate_is_judged_at_all_sizes():
    model = nn.Linear(4, 2).eval()
    given = torch.randn(3, 4)
    program = tsopt.capture(model, given, dynamic={"input": {0: "n[1..32]"}})
    found = validate_ranges(model, program, example(given), seed=0)

    def candidate(x):
        return model(x) + (1 if x.shape[0] == 7 else 0)

    oracle = Oracle(model, example(given), None)
    assert oracle.judge(candidate).ok
    verdict = Judge(oracle, found.held_out).judge(candidate)
    assert not verdict.ok
    assert verdict.reason.startswith("at n 7: ")


def test_a_criterion_does_not_excuse_writes_to_inputs_that_eager_leaves_alone():
    model, given = nn.Linear(4, 2).eval(), example(torch.randn(3, 4))

    def spoiling(x):
        y = model(x)
        x.mul_(1.1)
        return y

    criterion = criterion_of(model, [given], "top1", 0.5, tsopt.capture(model, given).signature)
    verdict = Judge(Oracle(model, given, None), criterion=criterion).judge(spoiling, precision="int8-static")
    assert (
        verdict.reason
        == "an input differs from eager after the call: relative error 10.00%, limit 4.40% (example input)"
    )
