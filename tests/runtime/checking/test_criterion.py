"""What a candidate in a lower precision is judged by, and metrics that cannot be used."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import tsopt
from tsopt.errors import SignatureError, UsageError
from tsopt.runtime.checking.criterion import (
    MAX_DROP,
    RELATIVE_ERROR,
    WIDER,
    WIDEST,
    InPieces,
    Likeness,
    check_metric,
    criterion_of,
)

DATA = [tsopt.example(torch.randn(4, 8, generator=torch.Generator().manual_seed(i))) for i in range(5)]
torch.manual_seed(0)
MODEL = nn.Linear(8, 3).eval()
SIGNATURE = tsopt.capture(MODEL, DATA[0]).signature


def off_by(share):
    """The model with an error of a share of its output."""

    def called(x):
        y = MODEL(x)
        error = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return y + error * share * y.norm() / error.norm()

    return called


def criterion(metric=None, max_drop=None, data=DATA, model=MODEL):
    return criterion_of(model, data, metric, max_drop, SIGNATURE)


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


def test_outputs_of_another_shape_are_never_accepted():
    for metric, drop in (("sqnr", None), ("cosine", 0.5), ("top1", 0.5)):
        assert not criterion(metric, drop).judge(lambda x: MODEL(x)[:2]).ok


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


def test_a_metric_may_use_larger_batches_and_the_methods_of_a_module():
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(3))
    exe = tsopt.compile(tsopt.capture(MODEL, DATA[0]), "eager")
    with torch.no_grad():
        called = InPieces(exe, SIGNATURE)
        assert torch.allclose(called.eval()(x), MODEL(x), atol=1e-6)
        assert torch.equal(called.forward(x[:4]), exe(x[:4]))
        assert not called.training
        with pytest.raises(SignatureError):
            called(x[:6])


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
