"""What capture refuses, and what the messages say."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.compiler.helpers import Net
from tests.passes.helpers import assert_computes
from tsopt.compiler.capture.capture import capture
from tsopt.errors import CaptureError, NotReady, UsageError

X = torch.randn(2, 3)


# ---- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(3), nn.RReLU(), nn.AlphaDropout(0.3)], ids=lambda m: type(m).__name__
)
def test_training_mode_that_matters_is_refused_with_the_fix(layer):
    model = nn.Sequential(nn.Linear(3, 3), layer).train()
    with pytest.raises(CaptureError, match=r"(?s)training mode.*model.eval\(\).*eval_mode=True") as caught:
        capture(model, X)
    assert caught.value.where is None or "1" in caught.value.where
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.LayerNorm(3), nn.Dropout(0.0)], ids=lambda m: type(m).__name__)
def test_training_mode_that_makes_no_difference_is_taken(layer):
    model = nn.Sequential(nn.Linear(3, 3), layer).train()
    capture(model, X)
    assert all(module.training for module in model.modules())


def test_eval_mode_captures_as_in_eval_and_puts_the_flags_back():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3)).train()
    model[1].eval()
    program = capture(model, X, eval_mode=True)
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert_computes(program, _evaluated(model), [X], exact=True)


def _evaluated(model):
    return copy.deepcopy(model).eval()


# ---- refused ----------------------------------------------------------------------------------------------


def branch(self, x):
    if x.sum() > 0:
        return x
    return -x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (branch, "the model has data-dependent control flow"),
        (lambda self, x: x * int(x.sum().item() > 0 and 2), "data-dependent control flow|computed from tensor values"),
        (lambda self, x: x[: int(x.sum())], "depends on|cannot capture|the model fails on the example input"),
        (lambda self, x: x.nonzero(), "aten.nonzero has a data-dependent output shape"),
        (lambda self, x: x[x > 0], "data-dependent output shape"),
        (lambda self, x: x * torch.equal(x, x + 1), "the model has data-dependent control flow"),
        (lambda self, x: torch.linalg.lstsq(x, x).rank, "aten.linalg_lstsq.default has a data-dependent output shape"),
        (lambda self, x: (x, x.sum().item()), "a Python number that depends on the input"),
    ],
    ids=["if", "item", "slice", "nonzero", "mask", "equal", "lstsq", "return-item"],
)
def test_what_depends_on_values_is_refused_with_the_place(function, words):
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Net(function), X)
    text = str(caught.value)
    assert "fix:" in text
    if "returns a Python number" not in text:
        assert "tests/compiler/" in text, text


def test_a_model_that_raises_is_told_with_its_own_error():
    def model(self, x):
        raise KeyError("of the user")

    with pytest.raises(CaptureError, match=r"(?s)the model fails on the example input.*KeyError: 'of the user'"):
        capture(Net(model), X)


def test_an_input_of_wrong_shape_is_the_models_own_error():
    with pytest.raises(CaptureError, match=r"(?s)the model fails on the example input.*RuntimeError"):
        capture(nn.Linear(4, 2).eval(), X)


def test_nan_in_weights_is_refused_and_can_be_allowed():
    model = nn.Linear(3, 2).eval()
    model.weight.data[0, 1] = float("nan")
    with pytest.raises(
        CaptureError, match=r"(?s)a weight contains NaN in 1 of 6 values.*where: weight.*allow_nan=True"
    ):
        capture(model, X)
    capture(model, X, allow_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_weights_of_one_byte_are_taken_unless_they_are_nan(dtype):
    class Model(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.register_buffer("w", torch.tensor([1.0, value]).to(dtype))

        def forward(self, x):
            return x * self.w.float()

    assert capture(Model(2.0), torch.ones(2)).weights
    with pytest.raises(NotReady, match="NaN in 1 of 2 values"):
        capture(Model(float("nan")), torch.ones(2))


def test_infinities_of_both_signs_in_weights_are_no_nan():
    model = nn.Linear(3, 2).eval()
    model.weight.data[0, :2] = torch.tensor([float("inf"), float("-inf")])
    capture(model, X)


def sparse():
    return Net(lambda self, x: x, w=torch.eye(3).to_sparse())


def quantized():
    return Net(lambda self, x: x, w=torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.LazyLinear(2).eval(), r"a lazy module has no weights yet"),
        (lambda: nn.Linear(3, 2, device="meta").eval(), "meta device"),
        (lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, device="meta")).eval(), "meta device"),
        (sparse, r"a weight is a torch.sparse_coo tensor"),
        (quantized, r"a weight is a quantized tensor"),
        (lambda: "model.pt", "the model is a str"),
        (lambda: {"state": 1}, "the model is a dict"),
    ],
    ids=["lazy", "meta", "part-meta", "sparse", "quantized", "str", "dict"],
)
@pytest.mark.filterwarnings("ignore")
def test_models_that_cannot_be_are_refused_by_name(model, words):
    with pytest.raises(CaptureError, match=words) as caught:
        capture(model(), X)
    assert caught.value.fix


@pytest.mark.parametrize("model", [lambda self, x: x.to_sparse(), lambda self, x: x.to_sparse().to_dense() + 1])
@pytest.mark.filterwarnings("ignore")
def test_sparse_values_are_refused_with_the_place(model):
    with pytest.raises(
        CaptureError, match=r"(?s)aten.*to_sparse.* creates a sparse_coo tensor.*tests/compiler.*fix: use a dense"
    ):
        capture(Net(model), X)


@pytest.mark.parametrize(
    "given",
    [X.to_sparse, lambda: X.to("meta"), lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)],
    ids=["sparse", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore")
def test_inputs_that_cannot_be_are_refused_by_name(given):
    with pytest.raises(CaptureError, match=r"(?s)an input is sparse, nested, quantized or on the meta device.*input 0"):
        capture(lambda x: x + 1, given())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([X, X], "the examples all have the same sizes"),
        ([X], "example_input is a list"),
        (3, "example_input is a int"),
        ("x", "example_input is a str"),
        (None, "example_input is a NoneType"),
        ({1: X}, "example_input is a dict"),
        ([], "example_input is a list"),
        (np.ones(3), "numpy array"),
        ((X, {"a": np.ones(3)}), "numpy array"),
    ],
)
def test_examples_that_could_mean_several_things_are_refused(given, words):
    with pytest.raises(UsageError, match=words) as caught:
        capture(lambda *xs: xs[0], given)
    assert caught.value.fix


def test_an_iterator_in_the_result_is_refused():
    with pytest.raises(CaptureError, match="the model creates a generator during the call"):
        capture(lambda x: (x + 1, (row for row in x)), X)
