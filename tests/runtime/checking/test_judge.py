"""The verdict at all sizes."""

from __future__ import annotations

import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import example
from tsopt.runtime.checking.accuracy import MADE_UP, ONE_CALL, Oracle
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


class Counts:
    """Remembers what it was called on, as which sizes and whether it was the example."""

    def __init__(self, model, given):
        self.model, self.given, self.calls = model, given, []

    def __call__(self, x):
        self.calls.append("example" if torch.equal(x, self.given) else len(x))
        return self.model(x)


def test_one_call_on_the_example_or_all_that_was_made_up():
    model, given = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    program = tsopt.capture(model, given, dynamic={"input": {0: "n[1..32]"}})
    held_out = validate_ranges(model, program, example(given), seed=0).held_out
    candidate = Counts(model, given)
    judge = Judge(Oracle(model, example(given), program), held_out)
    assert judge.judge(candidate, part=ONE_CALL).inputs == ("example",)
    assert candidate.calls == ["example"]
    candidate.calls.clear()
    everything = judge.judge(candidate).inputs
    sizes = [size for size in candidate.calls if size not in ("example", 3)]
    candidate.calls.clear()
    assert judge.judge(candidate, part=MADE_UP).inputs == everything[1:]
    assert "example" not in candidate.calls
    assert [size for size in candidate.calls if size != 3] == sizes != []


def test_a_criterion_is_asked_in_one_call_and_not_for_what_was_made_up():
    model, given = nn.Linear(4, 2).eval(), torch.randn(3, 4)
    criterion = criterion_of(model, [example(given)], "top1", 0.5, tsopt.capture(model, given).signature)
    judge = Judge(Oracle(model, example(given), None), criterion=criterion)
    candidate = Counts(lambda x: model(x) if torch.equal(x, given) else -model(x), given)
    assert judge.judge(candidate, precision="int8-static", part=MADE_UP).ok
    assert "example" not in candidate.calls, "nor is the criterion asked, whose data it is"
    wrong = Counts(lambda x: -model(x), given)
    assert not judge.judge(wrong, precision="int8-static", part=ONE_CALL).ok


def test_where_nothing_could_be_made_up_the_example_decides():
    given = torch.randn(3, 4)

    def model(x):
        assert torch.equal(x, given)
        return x * 2

    oracle = Oracle(model, example(given), None)
    assert [item.inputs.kind for item in oracle.expected] == ["example"]
    assert not oracle.judge(lambda x: x * 3, part=MADE_UP).ok
