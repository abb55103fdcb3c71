"""The score of what runs in place of a model, and what its metric is called."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import tsopt
from tests.regression.models import Net, X
from tsopt.errors import UsageError
from tsopt.regression.score import Score, name_of_metric


class Counted:
    """Counts the calls."""

    def __init__(self, called) -> None:
        self.called, self.count = called, 0

    def __call__(self, x):
        self.count += 1
        return self.called(x)


@pytest.mark.parametrize("metric", [None, "cosine", "sqnr", "top1"])
def test_neither_is_called_twice_for_an_input(metric):
    model = Counted(Net().eval())
    score, fast = Score(metric, model, tsopt.example(X), 0), Counted(Net().eval())
    model.count = 0
    assert score.of(fast) == pytest.approx(1.0)
    assert (model.count, fast.count) == (0, len(score._data))
    assert score.of(lambda x: -model(x)) < 0.5


def test_an_axis_of_classes_that_has_to_be_guessed_is_refused():
    with pytest.raises(UsageError, match="needs rows of scores"):
        Score("top1", nn.Identity(), tsopt.example(torch.ones(1, 2, 3, 4)), 0)


def accuracy(called, times=1):
    return 0.9 * times


class Accuracy:
    def __call__(self, called):
        return 0.9


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        (None, "agreement"),
        ("top1", "top1"),
        (accuracy, "accuracy"),
        (partial(partial(accuracy), times=2), "accuracy"),
        (Accuracy(), "Accuracy"),
        (lambda called: 0.9, "metric"),
    ],
)
def test_a_metric_has_the_name_of_its_function(metric, name):
    assert name_of_metric(metric) == name
