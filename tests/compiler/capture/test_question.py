"""Questions to tensors: asked again at the call, of tensors and of arrays; read from files that nobody vouches for."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tsopt.compiler.capture.question import Question

X = torch.arange(12.0).reshape(3, 4)
IMAGE = torch.ones(1, 2, 3, 4)


def with_attribute():
    made = X.clone()
    made.scale = 2.0
    return made


@pytest.mark.parametrize(
    ("question", "same", "other"),
    [
        (Question("is_contiguous", (), True), X + 1, X.t()),
        (Question("hasattr", ("scale",), False), X, with_attribute()),
        (Question("is_contiguous", ("channels_last",), False), IMAGE, IMAGE.to(memory_format=torch.channels_last)),
        (Question("stride", (), (4, 1)), X + 1, X.t()),
        (Question("stride", (0,), 4), X + 1, X.t()),
        (Question("storage_offset", (), 0), X + 1, X[1:]),
        (Question("requires_grad", (), False), X, X.clone().requires_grad_()),
        (Question("is_leaf", (), True), X, X.clone().requires_grad_() + 1),
    ],
)
def test_it_is_asked_again(question, same, other):
    assert question.answered_by(same)
    assert not question.answered_by(other)
    assert Question.from_json(json.loads(json.dumps(question.to_json()))) == question


@pytest.mark.parametrize(
    ("question", "same", "other"),
    [
        (Question("is_contiguous", (), True), X.numpy(), X.numpy().T),
        (Question("stride", (), (4, 1)), X.numpy(), X.numpy().T),
        (Question("stride", (1,), 1), X.numpy(), X.numpy().T),
    ],
)
def test_an_array_is_asked_for_its_strides(question, same, other):
    assert question.answered_by(same)
    assert not question.answered_by(other)


def test_an_array_has_no_gradients():
    assert Question("requires_grad", (), False).answered_by(np.ones(3))


@pytest.mark.parametrize("name", ["astype", "imag"])
def test_what_a_class_defines_nobody_has_set(name):
    asked = Question("hasattr", (name,), False)
    assert asked.answered_by(X)  # whose `imag` raises
    assert asked.answered_by(X.numpy())


@pytest.mark.parametrize(
    "data",
    [
        ["__class__", [], True],
        ["tolist", [], True],
        ["requires_grad", [1], True],
        ["requires_grad", [], 1],
        ["stride", ["__globals__"], 1],
        ["stride", [0, 1], 1],
        ["stride", [], "text"],
        ["stride", [], [1.5]],
        ["is_contiguous", [True], True],
        [["stride"], [], 1],
        ["hasattr", [True], False],
        ["hasattr", ["scale", "shift"], False],
        ["hasattr", ["scale"], True],
    ],
)
def test_what_is_not_a_question_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        Question.from_json(data)


def test_one_that_cannot_be_asked_again_is_none():
    assert Question.of("is_contiguous", (), object()) is None
    assert Question.of("is_pinned", ("cuda",), False) is None


def test_it_reads_as_it_was_written():
    assert str(Question("stride", (1,), 4)) == "stride(1)"
    assert str(Question("requires_grad", (), False)) == "requires_grad"
