"""What a candidate in a lower precision is judged by, and metrics that cannot be used."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tsopt
from tests.runtime.checking.judged import DATA, MODEL, criterion, off_by
from tsopt.compiler.protect import as_eval
from tsopt.errors import UsageError
from tsopt.runtime.checking.agreement import relative_error, top1
from tsopt.runtime.checking.criterion import (
    MAX_DROP,
    RELATIVE_ERROR,
    WIDER,
    WIDEST,
    Likeness,
    check_metric,
)


@pytest.mark.parametrize(("share", "ok"), [(0.0, True), (0.04, True), (0.05, False)])
def test_the_relative_error_of_all_inputs_together_decides(share, ok):
    found = criterion().judge(off_by(share))
    assert found.ok == ok
    assert found.loss == pytest.approx(share, abs=1e-6)
    assert found.text == f"relative error {share:.2%} on 5 inputs, limit 4.40%"


def test_one_input_of_many_may_be_further_off():
    def called(x):
        return off_by(0.06)(x) if torch.equal(x, DATA[0].args[0]) else MODEL(x)

    assert criterion().judge(called).ok


def test_agreement_of_the_largest():
    def called(x):
        y = MODEL(x).clone()
        if torch.equal(x, DATA[0].args[0]):
            y[0] = y[0].flip(0) if int(y[0].argmax()) != 1 else y[0].roll(1)
        return y

    found = criterion("top1", 0.01).judge(called)
    assert (found.ok, found.loss) == (False, pytest.approx(1 / 20))
    assert found.text == "top-1 agreement with eager 0.95 on 5 inputs, at least 0.99 is required"
    assert criterion("top1", 0.05).judge(called).ok


def test_cosine_does_not_see_a_scale():
    assert criterion("cosine", 0.0001).judge(lambda x: 3 * MODEL(x)).ok
    assert not criterion("cosine", 0.01).judge(off_by(0.3)).ok


def test_rows_of_scores_are_judged_by_their_largest_and_other_outputs_by_the_cosine():
    assert "top-1" in criterion(max_drop=0.1).judge(MODEL).text
    assert "cosine" in criterion(max_drop=0.1, model=lambda x: MODEL(x)[:, :1]).judge(lambda x: MODEL(x)[:, :1]).text


def two(share, other):
    """The model with an error, and a box with another one."""
    scores, boxes = off_by(share), off_by(other)
    return lambda x: (scores(x), boxes(x) * 10)


@pytest.mark.parametrize("metric", ["top1", None])
def test_top1_holds_other_outputs_to_a_relative_error(metric):
    found = criterion(metric, 0.3, model=two(0, 0))
    assert found.judge(two(0.1, 0.04)).ok
    judgement = found.judge(two(0, 0.05))
    assert not judgement.ok
    assert judgement.text.startswith("top-1 agreement with eager of output 0 1 on 5 inputs, at least 0.7 is required; ")
    assert judgement.text.endswith("; other outputs: relative error 5.00% (output 1) on 5 inputs, limit 4.40%")


def test_the_output_with_the_largest_error_is_named():
    found = criterion(model=two(0, 0)).judge(two(0.01, 0.03))
    assert found.text == "relative error 3.00% (output 1) on 5 inputs, limit 4.40%"


def test_integers_beside_scores_follow_from_them():
    def with_order(called):
        return lambda x: (called(x), called(x).argsort(-1))

    found = criterion("top1", 0.3, model=with_order(MODEL))
    assert found.judge(lambda x: (MODEL(x), MODEL(x).argsort(-1).flip(-1))).ok


def test_rows_that_may_be_no_scores_have_a_high_cosine_too():
    """Sizes, of which the first is the largest whatever the others are."""

    def sizes(called):
        return lambda x: torch.cat((torch.full_like(x[:, :1], 9.0), called(x)), 1)

    found = criterion(None, 0.01, model=sizes(MODEL))
    judgement = found.judge(sizes(off_by(5.0)))
    assert not judgement.ok
    assert "top-1 agreement with eager 1 on 5 inputs" in judgement.text
    assert "; cosine similarity to eager 0." in judgement.text
    assert judgement.loss > judgement.limit
    assert criterion("top1", 0.01, model=sizes(MODEL)).judge(sizes(off_by(5.0))).ok, "the user says that they are"


def test_outputs_of_another_shape_are_never_accepted():
    for metric, drop in (("sqnr", None), ("cosine", 0.5), ("top1", 0.5)):
        assert not criterion(metric, drop).judge(lambda x: MODEL(x)[:2]).ok


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("metric", "drop"), [("sqnr", None), ("cosine", 1.5), ("top1", 1.0)])
def test_nan_and_infinities_of_a_candidate_alone_are_no_loss_of_accuracy(metric, drop, number):
    def half(x):
        return MODEL(x).masked_fill(x[:, :1] > 0, number)

    def all_of_one(x):
        return torch.full_like(MODEL(x), number) if torch.equal(x, DATA[-1].args[0]) else MODEL(x)

    for called in (half, all_of_one):
        found = criterion(metric, drop).judge(called)
        assert (found.ok, found.text) == (False, "NaN or infinities are not where eager has them")
        assert not criterion(metric, drop, model=called).judge(MODEL).ok
        assert criterion(metric, drop, model=called).judge(called).ok


def test_errors_whose_squares_no_float64_holds_are_infinite():
    large = torch.tensor([1e200], dtype=torch.float64)
    assert relative_error([[2 * large]], [[large]]) == math.inf


def test_a_row_of_nan_agrees_with_no_class():
    rows = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
    assert top1([[torch.full_like(rows, math.nan)]], [[rows]]) == 0
    assert top1([[rows]], [[rows]]) == 1


def test_the_cosine_is_that_of_finite_values():
    """A vocabulary mask leaves -inf in the logits."""

    def masked(called):
        return lambda x: torch.cat((called(x), torch.full_like(x[:, :1], -math.inf)), 1)

    found = criterion("cosine", 0.01, model=masked(MODEL))
    assert found.judge(masked(MODEL)).loss == pytest.approx(0, abs=1e-6)
    assert found.judge(masked(off_by(0.1))).loss == pytest.approx(0.1**2 / 2, rel=0.5)


def maps(*sizes):
    return lambda x: MODEL(x).view(4, 3, *[1] * len(sizes)).expand(4, 3, *sizes)


def test_top1_does_not_guess_the_axis_of_the_classes_of_maps():
    with pytest.raises(UsageError, match=r"rows of scores\n  why: the output is \[4, 3, 5, 6\].*\n  fix: pass a func"):
        criterion("top1", 0.1, model=maps(5, 6))
    assert criterion("cosine", 0.1, model=maps(5, 6)).judge(maps(5, 6)).ok


def test_top1_says_which_axis_it_takes_where_two_are_possible():
    found = criterion("top1", 0.1, model=maps(5)).judge(maps(5))
    assert found.text == "top-1 agreement with eager (along the last axis of [4, 3, 5]) 1 on 5 inputs, " + (
        "at least 0.9 is required"
    )


def test_classes_that_differ_are_too_many_above_a_hundredth():
    def classes(x):
        return MODEL(x).argmax(1)

    def other(x):
        return (classes(x) + (x[:, 0] > 0).long()) % 3

    found = criterion(model=classes)
    assert found.judge(classes).ok
    assert found.judge(other).loss == math.inf


def test_infinities_do_not_decide_here():
    def masked(called):
        return lambda x: called(x).masked_fill(x[:, :1] > 0, -math.inf)

    assert criterion(model=masked(MODEL)).judge(masked(off_by(0.01))).ok


def test_a_model_that_writes_to_its_input_leaves_the_data():
    before = DATA[0].args[0].clone()
    criterion(model=lambda x: x.mul_(2)).judge(lambda x: x.mul_(2))
    assert torch.equal(DATA[0].args[0], before)


def test_the_tolerance_is_a_multiple_of_the_largest_error():
    found = criterion()
    assert found.tolerance(MODEL) == RELATIVE_ERROR
    assert found.tolerance(off_by(0.03)) == pytest.approx(0.03 * WIDER)
    assert found.tolerance(off_by(10.0)) == WIDEST


def test_a_metric_of_the_user_decides_by_its_drop():
    values = {MODEL: 0.9}

    def metric(model):
        return values.get(getattr(model, "_called", model), 0.893)

    found = criterion(metric, 0.01)
    assert not found.is_cheap
    assert found.judge(off_by(1)).ok
    values[MODEL] = 0.904
    found = criterion(metric, 0.01)
    judgement = found.judge(off_by(1))
    assert (judgement.ok, judgement.text) == (False, "metric 0.893, eager 0.904: a drop of 0.011, limit 0.01")


def test_the_drop_is_a_hundredth_unless_it_is_given():
    assert MAX_DROP == 0.01
    assert "at least 0.99 is" in criterion("top1").judge(MODEL).text


def wrong(model):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (wrong, "the metric raises KeyError\n  where: tests.*\n  why: 'labels'"),
        (lambda model: math.nan, "the metric returns nan"),
        (lambda model: "good", "the metric raises ValueError"),
        (lambda model: None, "the metric raises TypeError"),
    ],
    ids=["raises", "nan", "text", "none"],
)
def test_metrics_that_cannot_be_used(metric, message):
    with pytest.raises(UsageError, match=message) as caught:
        criterion(metric, 0.1)
    assert "\n  fix: " in str(caught.value)


def of_model_only(value, raises=None):
    """A metric that is 1 for the model; for a candidate it is a value, or raises after a call."""

    def metric(called):
        if called is MODEL:
            return 1.0
        called(DATA[0].args[0])
        if raises is not None:
            raise raises
        return value

    return metric


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_a_metric_without_a_value_for_a_candidate_refuses_it(value):
    found = criterion(of_model_only(value), 0.1).judge(MODEL)
    assert (found.ok, found.loss, found.text) == (False, math.inf, f"the metric returns {value:g}, eager 1")


def test_a_metric_that_raises_on_nan_refuses_the_candidate():
    found = criterion(of_model_only(1.0, ValueError("Input contains NaN")), 0.1)
    judgement = found.judge(lambda x: MODEL(x) * math.nan)
    assert (judgement.ok, judgement.text) == (False, "the metric raises ValueError: outputs contain NaN, eager 1")
    with pytest.raises(UsageError, match="the metric raises ValueError"):
        found.judge(MODEL)


def test_a_call_that_candidates_do_not_take_is_named():
    executable = tsopt.compile(tsopt.capture(MODEL, DATA[0]), "eager")
    found = criterion(lambda called: float(called(torch.zeros(4, 2, 8)).sum() * 0), 0.1)
    with pytest.raises(UsageError, match=r"do not support: input 'input' has shape \[4, 2, 8\]") as caught:
        found.judge(executable)
    assert "\n  fix: pass an input like the one in the example" in str(caught.value)


def test_a_metric_has_the_module_itself_in_eval_mode():
    model = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.5)).train()
    seen = []

    def metric(called):
        seen.append((called is model, called.training))
        called.eval()
        value = float(called(DATA[0].args[0]).sum())
        called.train()
        return value

    assert criterion(metric, 0.1, model=as_eval(model, True)).judge(model[0]).ok
    assert seen[:2] == [(True, False)] * 2
    assert model.training
    assert model[1].training


def test_a_random_metric_is_refused():
    values = iter([0.9, 0.8])
    with pytest.raises(
        UsageError, match=r"differs from call to call\n  why: it returned 0.9 and 0.8 for the same model"
    ):
        criterion(lambda model: next(values), 0.01)


@pytest.mark.parametrize(
    ("metric", "max_drop", "message"),
    [
        ("f1", None, "unknown metric 'f1'\n  fix: use one of: sqnr, cosine, top1"),
        (None, -0.1, "max_drop must be 0 or more, got -0.1"),
        (None, math.nan, "max_drop must be 0 or more"),
        ("sqnr", 0.1, "max_drop has no meaning for the metric 'sqnr'"),
    ],
)
def test_options_that_mean_nothing(metric, max_drop, message):
    with pytest.raises(UsageError, match=message):
        check_metric(metric, max_drop)


def test_what_is_asked_for_is_a_key_unless_it_is_a_function():
    assert criterion("top1", 0.1).key != criterion("top1", 0.2).key != ""
    assert criterion(lambda model: 1.0).key == ""
    assert isinstance(criterion(), Likeness)
