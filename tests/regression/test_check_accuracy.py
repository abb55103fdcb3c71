"""`tsopt.check`: how near the outputs must be to those of eager, by which metric."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.regression.models import OPTIONS, X
from tests.runtime.racing.helpers import fast_timings
from tsopt.regression import check as module
from tsopt.regression.outcome import Check


def test_the_outputs_must_be_as_near_to_eager(model, baseline, paces):
    paces(now=5.0)
    found = tsopt.check(model, X, baseline, candidate=lambda x: model(x) + torch.tensor([1.0, -1, 1, -1]))
    assert (found.verdict, found.accuracy, found.ok) == ("less accurate", "less accurate", False)
    paces(now=9.0)
    found = tsopt.check(model, X, baseline, candidate=lambda x: -model(x))
    assert found.verdict == "slower and less accurate"


@pytest.mark.parametrize(("times", "accuracy"), [(3.0, "less accurate"), (0.8, "less accurate"), (1.01, "ok")])
def test_outputs_of_another_size_are_not_as_near(model, baseline, paces, times, accuracy):
    """The cosine of all of them is 1."""
    paces(now=5.0)
    found = tsopt.check(model, X, baseline, candidate=lambda x: times * model(x))
    assert (found.now.metric, found.accuracy) == ("agreement", accuracy)


def test_of_integers_it_is_the_share_that_is_equal(model, paces, monkeypatch, tmp_path):
    paces(now=5.0)

    def chosen(x):
        return model(x.expand(100, 4)).argmax(-1)

    def almost(x):
        found = chosen(x)
        found[:30] += 1
        return found

    tsopt.check(chosen, X, tmp_path / "b.json", update=True, candidate=chosen)
    found = tsopt.check(chosen, X, tmp_path / "b.json", candidate=almost)
    assert found.now.score == pytest.approx(0.7)
    assert not [remark for remark in found.remarks if "another name" in remark]


def test_no_call_is_compared_with_what_an_earlier_one_has_left(paces, tmp_path):
    paces(now=5.0)
    found = tsopt.check(Counter().eval(), X, tmp_path / "b.json", update=True, **OPTIONS)
    assert found.now.score == pytest.approx(1.0)


class Counter(nn.Module):
    """Counts its calls, and adds that to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * 0.01 + self.count


def test_a_bundle_is_compared_from_the_state_that_it_has(paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="eager + passes")
    paces(now=5.0)
    options = OPTIONS | {"backends": ("eager",)}
    tsopt.optimize(Counter().eval(), X, **options).save(tmp_path / "b.tsopt")
    found = tsopt.check(Counter().eval(), X, tmp_path / "b.tsopt", trust=True, **options)
    assert (found.baseline.score, found.now.score) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_bundle_with_other_outputs_is_told_and_accuracy_is_that_of_eager(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    tsopt.optimize(nn.Linear(4, 3).eval(), X, **OPTIONS).save(tmp_path / "b.tsopt")
    found = tsopt.check(model, X, tmp_path / "b.tsopt", trust=True, **OPTIONS)
    assert (found.accuracy, found.baseline.score) == ("ok", pytest.approx(1.0))
    said = "the outputs of the bundle are float32[1, 3], and those of the model are float32[1, 4]"
    assert f"{said}: accuracy is compared with that of eager" in found.remarks


def test_a_drop_to_the_limit_is_within_it(model, baseline):
    then = module.read_baseline(baseline)
    limits = {"max_slowdown": 0.05, "max_drop": 0.005}
    made = Check(
        now=replace(then, score=0.975), baseline=replace(then, score=0.98), slowdown=None, speed="ok", **limits
    )
    assert made.drop > 0.005
    assert made.accuracy == "ok"


def test_a_metric_of_the_users_own_is_compared(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="TorchScript")
    paces(now=5.0)
    score = 0.9

    def accuracy(called):
        called(X)
        return score

    given = {"metric": accuracy, "max_drop": 0.01, **OPTIONS}
    tsopt.check(model, X, tmp_path / "b.json", update=True, **given)
    score = 0.895
    assert tsopt.check(model, X, tmp_path / "b.json", **given).verdict == "ok"
    score = 0.88
    found = tsopt.check(model, X, tmp_path / "b.json", **given)
    assert found.verdict == "less accurate"
    assert found.drop == pytest.approx(0.02)
    for other, text in ({}, "none was given"), ({"metric": "top1"}, "this one is top1"):
        with pytest.raises(tsopt.UsageError, match=f"its metric is accuracy, and {text}"):
            tsopt.check(model, X, tmp_path / "b.json", **OPTIONS | other)


def test_a_baseline_by_no_metric_of_the_users_is_compared_where_none_is_passed(model, baseline, paces):
    paces(now=5.0)
    with pytest.raises(
        tsopt.UsageError, match=r"(?s)its metric is agreement, and this one is top1.*leave out the metric"
    ):
        tsopt.check(model, X, baseline, metric="top1", **OPTIONS)
    assert tsopt.check(model, X, baseline, **OPTIONS).accuracy == "ok"


def test_metrics_without_a_name_may_differ_and_a_remark_says_so(model, paces, tmp_path):
    paces(now=5.0)
    place, mine = tmp_path / "b.json", {"candidate": lambda x: model(x)}
    made = tsopt.check(model, X, place, update=True, metric=lambda called: 0.9, **mine)
    assert (made.now.winner, made.now.metric) == ("candidate", "metric")
    found = tsopt.check(model, X, place, metric=lambda called: 0.95, **mine)
    (said,) = [remark for remark in found.remarks if "metric" in remark]
    assert said.startswith("the baseline has a metric without a name")


@pytest.mark.parametrize("named", ["cosine", "agreement"])
def test_the_metric_of_the_baseline_is_used_where_none_is_named(model, baseline, paces, named):
    paces(now=5.0)
    then = replace(module.read_baseline(baseline), metric=named)
    found = tsopt.check(model, X, then, **OPTIONS)
    assert (found.now.metric, found.accuracy) == (named, "ok")


def test_a_metric_may_use_the_methods_of_a_module_and_larger_batches(model, paces, tmp_path):
    paces(now=5.0)

    def metric(called):
        return float(called.eval()(torch.ones(8, 4)).shape[0])

    found = tsopt.check(model, X, tmp_path / "b.json", update=True, metric=metric, **OPTIONS)
    assert found.now.score == 8.0


def test_a_baseline_without_a_score_is_compared_with_eager(model, baseline, paces):
    paces(now=5.0)
    then = replace(module.read_baseline(baseline), score=None, metric="")
    assert tsopt.check(model, X, then, **OPTIONS).accuracy == "ok"
    found = tsopt.check(model, X, then, candidate=lambda x: -model(x))
    assert found.accuracy == "less accurate"
    assert "the baseline has no score: accuracy is compared with that of eager" in found.remarks


def test_a_lower_precision_is_compiled_in_it(model, paces, monkeypatch, tmp_path):
    fast_timings(monkeypatch, wins="eager + passes, precision bf16")
    paces(now=5.0)
    options = OPTIONS | {"backends": ("eager",), "precision": "bf16"}
    found = tsopt.check(model, X, tmp_path / "b.json", update=True, **options)
    assert "bf16" in found.now.winner


@pytest.mark.parametrize(
    ("options", "judged"),
    [
        ({"precision": "bf16"}, True),
        ({"level": 3}, True),
        ({"backends": ("eager?precision=bf16",)}, True),
        ({"precision": "fp32"}, False),
        ({}, False),
    ],
)
def test_where_lower_precisions_race_the_metric_chooses_among_them(
    model, paces, monkeypatch, tmp_path, options, judged
):
    given = {}
    monkeypatch.setattr(module, "optimize", lambda *args, **kw: given.update(kw) or tsopt.optimize(*args, **kw))
    paces(now=5.0)
    options = OPTIONS | {"backends": ("eager",)} | options
    tsopt.check(model, X, tmp_path / "b.json", update=True, metric="top1", max_drop=1.0, **options)
    assert ("metric" in given, "max_drop" in given) == (judged, judged)
