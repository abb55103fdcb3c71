"""Indices: checked in each call, stated, or known to exist."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tsopt
from tests.runtime.helpers import save
from tests.runtime.onnx.integers.helpers import BOTH, FLOATS, INTS, Products, examined, limits
from tsopt.errors import IndexOutOfRange
from tsopt.runtime.calling.value_checks import INDEX, REFUSED, Bound
from tsopt.runtime.onnx.integers.engine_differences import ONNX_RUNTIME

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_an_index_that_is_not_checked_is_stated_for_every_engine(engine):
    found = examined(nn.Embedding(4, 2), INTS, engine=engine)
    assert not found.bounds
    assert "out-of-range indices" in found.notes[0]


def test_openvino_which_reads_other_memory_is_asked_for_no_index_that_does_not_exist():
    model = nn.Embedding(10, 2)
    run = tsopt.compile(tsopt.capture(model, torch.tensor([1, 9])), "openvino")
    assert not run.notes
    with pytest.raises(IndexError):
        run(torch.tensor([51, 1]))


def test_indices_that_are_computed_are_stated_with_what_becomes_of_them():
    def model(i, x):
        return x[i * i]

    made = tsopt.compile(tsopt.capture(model, (INTS, torch.ones(64, 2))), "openvino")
    assert "reads memory outside the tensor" in made.notes[-1]
    assert "check_indices" not in made.notes[-1]


@pytest.mark.parametrize(("width", "checked"), [(4, False), (200_000, True)])
def test_indices_are_checked_by_default_where_that_costs_next_to_nothing(width, checked):
    found = examined(Products(width), torch.zeros(2, 64).long(), engine=ONNX_RUNTIME, threads=1)
    assert bool(found.bounds) is checked
    assert bool(found.notes) is not checked


@pytest.mark.parametrize(
    ("model", "low", "high", "kind"),
    [
        (lambda i, x: F.embedding(i, x), 0, 3, INDEX),
        (lambda i, x: x[i], -4, 3, INDEX),
        (lambda i, x: x[:, i], -5, 4, INDEX),
        (lambda i, x: x[None, i], -4, 3, INDEX),
        (lambda i, x: x.index_select(1, i), 0, 4, INDEX),
        (lambda i, x: x.gather(0, i[:, None]), 0, 3, REFUSED),
        (lambda i, x: x.scatter(1, i[:, None], 1.0), 0, 4, REFUSED),
        (lambda i, x: x.take(i), -20, 19, INDEX),
        (lambda i, x: F.one_hot(i, 7) + x.sum(), 0, 6, REFUSED),
        (lambda i, x: x[(i * 2 + 1).int()], -2, 1, INDEX),
        (lambda i, x: F.embedding(3 - i, x), 0, 3, INDEX),
        (lambda i, x: F.embedding(-i, x), -3, 0, INDEX),
    ],
)
def test_asked_for_indices_are_checked_through_casts_and_constant_arithmetic(model, low, high, kind):
    found = examined(model, INTS, torch.ones(4, 5), engine=ONNX_RUNTIME, check_indices=True)
    assert limits(found) == [(low, high, kind)]
    assert not found.notes


def test_the_target_that_a_loss_ignores_is_taken():
    found = examined(
        lambda i, x: F.cross_entropy(x, i), INTS, torch.ones(3, 5), engine=ONNX_RUNTIME, check_indices=True
    )
    assert found.bounds == (Bound(0, 0, 4, INDEX, also=-100),)


@pytest.mark.parametrize("change", [lambda i: i[1:], lambda i: torch.where(i > 1, i, 0), lambda i: i.float().long()])
def test_an_index_that_is_more_than_an_input_is_stated_even_then(change):
    found = examined(lambda i, x: x[change(i)], INTS, torch.ones(4, 3), engine=ONNX_RUNTIME, check_indices=True)
    assert not found.bounds
    assert found.notes


@pytest.mark.parametrize("change", [lambda i: i % 4, lambda i: (i > 1).long(), lambda i: i.argmax(0, keepdim=True)])
def test_an_index_that_exists_whatever_the_input_is_not_mentioned(change):
    found = examined(lambda i, x: F.embedding(change(i), x), INTS, torch.ones(4, 3), engine=ONNX_RUNTIME)
    assert (found.bounds, found.notes) == ((), ())


@pytest.mark.parametrize(
    ("change", "is_mentioned"),
    [
        (lambda x: x.sigmoid() * 3, True),
        (lambda x: x.sigmoid().nan_to_num() * 3, False),
        (lambda x: x % 1.0 * 4, True),
    ],
    ids=["nan", "number", "the end"],
)
@pytest.mark.parametrize("engine", BOTH, ids=lambda engine: engine.name)
def test_an_index_that_may_be_cut_from_nan_is_stated_and_its_model_taken(engine, change, is_mentioned):
    found = examined(lambda x, w: F.embedding(change(x).long(), w), FLOATS, torch.ones(4, 3), engine=engine)
    assert not found.refused
    assert bool(found.notes) is is_mentioned


def test_the_bound_is_the_size_of_the_call_where_sizes_differ():
    def model(i, x):
        return F.embedding(i, x) * 2

    args = (INTS, torch.ones(4, 3))
    found = examined(model, *args, engine=ONNX_RUNTIME, check_indices=True, dynamic={"x": {0: "rows[2..9]"}})
    assert found.bounds == (Bound(0, 0, -1, INDEX, of=1, axis=0, above=1),)


def test_a_call_with_an_index_that_does_not_exist_raises_as_eager_does_and_so_does_its_bundle(tmp_path):
    model, good = nn.Embedding(4, 2).eval(), torch.tensor([1, 3])
    made = tsopt.compile(tsopt.capture(model, good), "onnxruntime", check_indices=True)
    loaded = tsopt.load(save(made, tmp_path / "m.tsopt", model, good))
    for called in (made, loaded):
        assert torch.equal(called(good), model(good))
        for bad in (torch.tensor([-1, 0]), torch.tensor([4, 0])):
            with pytest.raises(IndexError):
                called(bad)
    with pytest.raises(IndexOutOfRange, match="'input'"):
        loaded(torch.tensor([-1, 0]))


def test_optimize_passes_the_wish_on():
    model = nn.Embedding(4, 2).eval()
    made = tsopt.optimize(
        *(model, torch.tensor([1])),
        backends=("onnxruntime",),
        check_indices=True,
        isolate=False,
        cache=False,
        seconds=0.02,
    )
    assert made.report.row("ONNX Runtime").notes == ()
