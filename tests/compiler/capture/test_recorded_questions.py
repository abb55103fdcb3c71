"""What a model's Python code asks of its inputs, as it is recorded."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from tsopt.compiler.calls.example import Example
from tsopt.compiler.capture.question import Question
from tsopt.compiler.capture.recorded_questions import asked_by

X = torch.arange(12.0).reshape(3, 4)
Y = X + 1
MODULE_LEVEL = object()


def questions(model, *args):
    return asked_by(model, Example(args)).questions


@pytest.mark.parametrize(
    ("ask", "question"),
    [
        (lambda x: x.is_contiguous(), Question("is_contiguous", (), True)),
        (lambda x: x.stride(), Question("stride", (), (4, 1))),
        (lambda x: x.stride(1), Question("stride", (1,), 1)),
        (lambda x: x.storage_offset(), Question("storage_offset", (), 0)),
        (lambda x: x.requires_grad, Question("requires_grad", (), False)),
        (lambda x: x.grad_fn, Question("requires_grad", (), False)),
        (lambda x: x.is_leaf, Question("is_leaf", (), True)),
        (lambda x: x.is_inference(), Question("is_inference", (), False)),
        (lambda x: x.data_ptr(), Question("stride", (), (4, 1))),
        (lambda x: torch.as_strided(x, (2,), (1,)), Question("stride", (), (4, 1))),
        (lambda x: x.t().is_contiguous(), Question("stride", (), (4, 1))),
        (lambda x: (x + 1).stride(), Question("stride", (), (4, 1))),
        (lambda x: x.contiguous().add_(1), Question("stride", (), (4, 1))),
        (lambda x: x.reshape(-1).__setitem__(0, 1.0), Question("stride", (), (4, 1))),
    ],
)
def test_a_question_is_recorded_with_its_answer(ask, question):
    def model(x):
        ask(x)
        return x * 2

    assert questions(model, X) == ((question,),)


def test_a_memory_format_is_part_of_the_question():
    image = torch.ones(1, 2, 3, 4)
    asked = questions(lambda x: x * x.is_contiguous(memory_format=torch.channels_last), image)
    assert asked == ((Question("is_contiguous", ("channels_last",), False),),)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x.reshape(-1) * 2,
        lambda x: (x + 1).reshape(-1).add_(1),
        lambda x: torch.relu_(x.clone()).flatten(),
        lambda x: x * x.shape[0] if x.dtype == torch.float32 else x,
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten()),
    ],
)
def test_what_does_not_depend_on_strides_asks_nothing(model):
    assert questions(model, X) == ((),)


def test_a_question_to_a_weight_is_not_one_to_an_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.w if self.w.is_contiguous() and self.w.requires_grad else x

    assert questions(Model(), X) == ((),)


def test_only_the_input_that_is_asked_has_questions():
    asked = questions(lambda x, y: x + y if y.is_contiguous() else x, X, Y)
    assert asked == ((), (Question("is_contiguous", (), True),))


def is_one(x, y):
    return x if x is y else x + y


def by_id(x, y):
    return x if id(x) == id(y) else x + y


def writes(x, y):
    x.add_(1)
    return x + y


@pytest.mark.parametrize(
    ("model", "args", "aliasing"),
    [
        (is_one, (X, Y), True),
        (is_one, (X, X), True),
        (is_one, (X, torch.ones(4)), False),  # never one object
        (is_one, (X, Y.double()), False),
        (by_id, (X, Y), True),
        (writes, (X, Y), True),
        (writes, (X, X), True),
        (writes, (X, torch.ones(4)), True),
        (lambda x: x.add_(1), (X,), False),  # alone
        (lambda x, y: x + y, (X, Y), False),
        (lambda x, y: x + y if y is not None else x, (X, Y), False),
        (lambda x, y: x if y is MODULE_LEVEL else x + y, (X, Y), False),
        (lambda x, y: x if y.__class__ is x.__class__ else x + y, (X, Y), False),
        (nn.MultiheadAttention(4, 2).eval(), (X, Y, Y.clone()), False),  # PyTorch's own shortcuts change no value
    ],
)
def test_it_counts_which_inputs_are_one_where_one_is_written_or_the_code_compares(model, args, aliasing):
    assert asked_by(
        model, Example(tuple(arg.clone() for arg in args) if args[0] is not args[-1] else args)
    ).aliasing == (aliasing)


def test_the_users_inputs_weights_and_counters_are_left_as_they_were():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(4, 3, max_norm=0.1)
            self.scale = nn.Parameter(torch.ones(3))
            self.calls = 0

        def forward(self, x, ids):
            self.calls += 1
            with torch.no_grad():
                self.scale.mul_(2)
            return x.add_(1)[:, :3] + self.table(ids) * self.scale

    model, x, ids = Model(), X.clone(), torch.tensor([0, 1, 3])
    before = [p.detach().clone() for p in model.parameters()]
    assert asked_by(model, Example((x, ids))).written == {0}
    assert torch.equal(x, X)
    assert model.calls == 0
    assert all(map(torch.equal, model.parameters(), before))


def test_of_a_model_that_fails_or_looks_at_values_what_it_asked_before_is_recorded():
    def fails(x):
        x.is_contiguous()
        raise ValueError("no")

    def looks(x):
        return x * 2 if x.is_contiguous() and float(x.sum()) > 0 else x

    for model in (fails, looks):
        found = asked_by(model, Example((X,)))
        assert (found.questions, found.aliasing) == (((Question("is_contiguous", (), True),),), False)


def test_nothing_is_computed():
    assert asked_by(lambda x: x // -1, Example((torch.tensor([-(2**63)]),))).questions == ((),)


def test_modes_of_the_thread_are_recorded_with_whether_they_are_on():
    def model(x):
        return x * 2 if torch.is_inference_mode_enabled() else x

    assert asked_by(model, Example((X,))).modes == (("inference mode", False),)
    with torch.inference_mode():
        assert asked_by(model, Example((X,))).modes == (("inference mode", True),)
    assert asked_by(lambda x: x * 2, Example((X,))).modes == ()


@pytest.mark.parametrize(
    ("model", "asks"),
    [
        (lambda x: x + torch.tensor(0.5), True),
        (lambda x: x + torch.ones(4), True),
        (lambda x: x.to(torch.get_default_dtype()), True),
        (lambda x: x + torch.tensor(2) + torch.arange(4), False),
        (lambda x: x + torch.tensor(0.5, dtype=torch.float64) + torch.zeros(4, dtype=x.dtype), False),
        (lambda x: x.float() + x.new_zeros(4) + torch.ones_like(x), False),
    ],
)
def test_what_is_made_in_the_default_dtype_is_recorded(model, asks):
    assert asked_by(model, Example((X,))).default_dtype == asks


def test_in_a_thread_that_is_profiled_identity_may_have_been_asked_for():
    sys.setprofile(lambda *_: None)
    try:
        assert asked_by(lambda x, y: x + y, Example((X, Y))).aliasing
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert not asked_by(lambda x, y: x + y, Example((X, Y))).aliasing
    assert sys.getprofile() is None
