"""Functions whose obvious formulas overflow or cancel: both engines compute them as accurately as PyTorch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tsopt.runtime.onnx.openvino import OpenVinoBackend
from tsopt.runtime.onnx.ort import OnnxRuntimeBackend

SIZES = torch.tensor(
    [0.0, 1e-30, 1e-8, 1e-4, 0.01, 0.3, 0.5, 0.7, 1.0, 2.0, 5.0, 18.0, 25.0, 80.0, 120.0, 200.0, 1e4, 1e30]
)
X = torch.cat([SIZES, -SIZES, torch.tensor([math.inf, -math.inf, math.nan])])
FIRST, SECOND = (part.flatten() for part in torch.meshgrid(X, X, indexing="ij"))
ENGINES = ["onnxruntime", "openvino"]


def check(model, *example, relative=1e-6, absolute=1e-37):
    """Every element is as close to float64 as a few roundings are, and infinite or NaN only where eager's is."""
    program = tsopt.transform(tsopt.capture(model, example, allow_nan=True))
    expected, wide = model(*example), model(*(value.double() for value in example))
    for engine in ENGINES:
        found = tsopt.compile(program, engine)(*example)
        assert torch.equal(found.isnan(), expected.isnan()), engine
        finite = expected.isfinite()
        assert torch.equal(found[~finite].nan_to_num(), expected[~finite].nan_to_num()), engine
        assert found[finite].isfinite().all(), engine
        off = (found.double() - wide)[finite].abs()
        slack = (expected.double() - wide)[finite].abs()
        assert (off <= relative * wide[finite].abs() + 4 * slack + absolute).all(), engine


@pytest.mark.parametrize("name", ["log1p", "expm1"])
def test_functions_near_one_keep_their_digits(name):
    x = X[X.abs() < 80]  # OpenVINO's exp ends at 88.4
    check(getattr(torch, name), x)


def test_the_logarithm_of_a_sigmoid_has_no_end():
    check(F.logsigmoid, X)


@pytest.mark.parametrize("name", ["logaddexp", "logaddexp2"])
def test_sums_of_exponentials_do_not_overflow(name):
    check(getattr(torch, name), FIRST, SECOND)


def test_sums_of_exponentials_in_half_precision():
    x = torch.tensor([-20.0, -5.0, 0.0, 5.0, 20.0]).half()
    run = tsopt.compile(tsopt.capture(torch.logaddexp, (x, x + 1)), "onnxruntime")
    torch.testing.assert_close(run(x, x + 1), torch.logaddexp(x, x + 1))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_cross_entropy_of_logits_does_not_overflow(reduction, weighted):
    x = SIZES[SIZES < 1e5].repeat(2)[:28].reshape(4, 7) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    target = torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 1.0, 0.0])
    weights = {"weight": target + 1, "pos_weight": target + 0.5} if weighted else {}

    def model(x, y):
        return F.binary_cross_entropy_with_logits(x, y, reduction=reduction, **weights)

    y = target.repeat(4, 1)
    program = tsopt.capture(model, (x, y))
    for engine in ENGINES:
        torch.testing.assert_close(tsopt.compile(program, engine)(x, y), model(x, y), msg=engine)


class Normed(nn.Module):
    """A layer norm of what is before it, as in a transformer."""

    def __init__(self, before):
        super().__init__()
        self.before, self.norm = before, nn.LayerNorm(64)
        self.register_buffer("row", torch.linspace(-1, 1, 64))

    def forward(self, x, y):
        return self.norm(self.before(self, x, y))


def by_hand(x, y):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


NORMS = {
    "layer norm": Normed(lambda self, x, y: x),
    "of a sum": Normed(lambda self, x, y: x + y),
    "of a sum that is used again": lambda x, y: (F.layer_norm(x + y, (64,)), x + y),
    "of a row and a sum": Normed(lambda self, x, y: (x + self.row) + y),
    "without weights": lambda x, y: F.layer_norm(x + y, (64,)),
    "of two axes": lambda x, y: F.layer_norm(x + y, (8, 64)),
    "by hand": by_hand,
    "of groups": lambda x, y: F.group_norm(x + y, 4),
    "of instances": lambda x, y: F.instance_norm(x + y),
    "of a batch": lambda x, y: F.batch_norm(x + y, None, None, training=True),
    "variance": lambda x, y: (x + y).var(-1),
    "deviation": lambda x, y: torch.std_mean(x + y, -1, correction=0)[0],
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", NORMS.values(), ids=NORMS.keys())
def test_a_mean_that_is_far_larger_than_the_spread_does_not_cost_the_variance(model, engine):
    """In float32, E[x^2] - E[x]^2 of numbers around 1000 is mostly rounding, and may be negative."""
    model = model.eval() if isinstance(model, nn.Module) else model
    x, y = (torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    run = tsopt.compile(tsopt.transform(tsopt.capture(model, (x, y))), engine)
    with torch.no_grad():
        for given in ((x + 1000, y), (x - 1000, y), (x * 1e-3 + 1, y * 0)):
            torch.testing.assert_close(run(*given), model(*given), rtol=2e-3, atol=2e-3)


class Tail(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "function",
    [torch.erfc, torch.special.erfcx, torch.special.log_ndtr, lambda x: torch.logcumsumexp(x, -1)],
    ids=["erfc", "erfcx", "log_ndtr", "logcumsumexp"],
)
def test_functions_without_a_stable_translation_are_refused(function):
    program = tsopt.capture(Tail(function), torch.randn(3, 4))
    for backend in (OnnxRuntimeBackend(), OpenVinoBackend()):
        (found,) = backend.unsupported(program)
        assert "loses" in found.why
        assert "test_stable_formulas.py" in found.where


def test_a_cross_entropy_with_smoothed_labels_is_refused():
    program = tsopt.capture(
        lambda x, labels: F.cross_entropy(x, labels, label_smoothing=0.1),
        (torch.randn(4, 3), torch.tensor([0, 1, 2, 0])),
    )
    (found,) = OnnxRuntimeBackend().unsupported(program)
    assert found.why == "the ONNX exporter leaves out label_smoothing"


@pytest.mark.parametrize(
    "function", [torch.log1p, F.logsigmoid, lambda x: torch.logaddexp(x, x * 2), lambda x: torch.logaddexp2(x, x * 2)]
)
def test_they_are_as_exact_in_float64(function):
    x = torch.tensor([0.0, 1e-20, -1e-20, 1e-9, 1e-3, 0.3, 0.9, 1.0, 30.0, 700.0], dtype=torch.float64)
    made = tsopt.compile(tsopt.capture(Tail(function), x), "onnxruntime")
    torch.testing.assert_close(made(x), function(x), rtol=1e-15, atol=0)
