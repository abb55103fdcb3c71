"""What branches do is done once, on a stack of their weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.passes.helpers import Repeat
from tests.passes.merge.examples import COUNT, MERGE, ODD, WIDTH, Body, Ensemble, Linear, X, merged, perceptron
from tsopt.passes import CommonSubexpressions, DeadCode


@pytest.mark.sliced(4)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_an_ensemble_is_one_product_a_layer(rows, dtype):
    model = Ensemble(perceptron).to(dtype)
    merged(model, torch.randn(rows, WIDTH, dtype=dtype), ["expand", "baddbmm", "relu", "baddbmm"])


def test_layers_without_bias_are_plain_products():
    model = Ensemble(lambda i: perceptron(bias=False), lambda ys: torch.stack(ys).mean(0))
    merged(model, X, ["expand", "matmul", "relu", "matmul", "mean.dim"])


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.LogSigmoid, nn.ELU])
def test_activations_are_applied_once(act):
    assert len(merged(Ensemble(lambda i: perceptron(act=act)), X).ops) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_merged(dtype):
    merged(Ensemble(perceptron).to(dtype), X.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.complex64], ids=str)
def test_layers_of_other_dtypes_are_merged(dtype):
    def made(*shape: int) -> torch.Tensor:
        return torch.randint(-9, 9, shape).to(dtype)

    layers = lambda i: nn.Sequential(Linear(made(WIDTH, WIDTH), made(WIDTH)), Linear(made(4, WIDTH)))  # noqa: E731
    merged(Ensemble(layers), made(3, WIDTH), ["expand", "baddbmm", "matmul"])


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_odd_layers_stay(kind, shared):
    """What is before and behind them is merged."""
    one = ODD[kind]()

    def layers(_: int) -> nn.Module:
        return nn.Sequential(*perceptron(), nn.Linear(4, WIDTH), one if shared else ODD[kind](), nn.Tanh())

    assert merged(Ensemble(layers), X).ops.count("linear") == COUNT


@pytest.mark.parametrize("shape", [(WIDTH,), (2, 3, WIDTH), (1, 1, WIDTH), (2, 0, WIDTH)], ids=str)
def test_inputs_of_any_rank_are_rows(shape):
    merged(Ensemble(perceptron), torch.randn(shape))


BODIES: dict[str, Callable[..., torch.Tensor]] = {
    "layer norm": lambda h, p, q: F.layer_norm(h, (WIDTH,), p, q),
    "layer norm, no shift": lambda h, p, q: F.layer_norm(h, (WIDTH,), p),
    "layer norm, plain": lambda h, p, q: F.layer_norm(h, (WIDTH,)),
    "rms norm": lambda h, p, q: F.rms_norm(h, (WIDTH,), p),
    "residual": lambda h, p, q: h + F.gelu(h) * p,
    "scale, shift, literal": lambda h, p, q: (h * p + q) * 0.5 - 1,
    "a scalar of its own": lambda h, p, q: h * p[0],
    "where": lambda h, p, q: torch.where(h > q, h, -h),
    "softmax": lambda h, p, q: h.softmax(-1),
    "log softmax over rows": lambda h, p, q: h.log_softmax(0),
    "mean": lambda h, p, q: h - h.mean(-1, keepdim=True),
    "sum of all axes": lambda h, p, q: h / (1 + h.abs().sum((0, 1))),
    "variance by hand": lambda h, p, q: h * (h.pow(2).mean(1, True) + q).rsqrt(),
    "largest": lambda h, p, q: h - h.amax(0, keepdim=True),
    "cumsum": lambda h, p, q: h.cumsum(1),
    "gated halves": lambda h, p, q: (lambda a, b: torch.cat([a * b.sigmoid(), b], -1))(*h.chunk(2, -1)),
    "rotated halves": lambda h, p, q: torch.cat([-h[:, 3:], h[:, :3]], -1) * p,
    "beside a shared value": lambda h, p, q: torch.cat([h * p, X], 1),
    "reshape and transpose": lambda h, p, q: (h * q).reshape(-1, 2, 3).transpose(1, 2).reshape(-1, WIDTH) + p,
    "permute": lambda h, p, q: torch.tanh((h * q).permute(1, 0)),
    "a column": lambda h, p, q: h.select(1, 2) * h[:, 1] + 1,
    "unsqueeze": lambda h, p, q: (h.unsqueeze(0) * p.unsqueeze(1).unsqueeze(1)).sum(0),
    "expand": lambda h, p, q: h.relu().unsqueeze(1).expand(-1, 2, -1) * p,
    "product with itself": lambda h, p, q: (h * q) @ h.transpose(0, 1),
    "product with a shared value": lambda h, p, q: torch.tanh(h) @ X.t(),
    "attention": lambda h, p, q: F.scaled_dot_product_attention(*((h * p).unsqueeze(0),) * 3),
    "attention of heads": lambda h, p, q: (
        F.scaled_dot_product_attention(*((h * p).reshape(1, 3, 2, 3).transpose(2, 3),) * 3) * q[0]
    ),
    "attention with a mask": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=X.reshape(3, 1, 6, 1)[:, :, :2]
    ),
    "attention with a mask of its own": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=h[:2, :2]
    ),
    "attention with one mask for all": lambda h, p, q: F.scaled_dot_product_attention(
        *((h * p).reshape(3, 1, 2, 3),) * 3, attn_mask=X[:2, :2]
    ),
    "cast": lambda h, p, q: ((h * p).double() + q).float(),
    "integers": lambda h, p, q: (h * 10).int() // 3 + 1,
    "masked": lambda h, p, q: (h * p).masked_fill(h > 0, 0.25),
}


@pytest.mark.sliced(8)
@pytest.mark.parametrize("name", BODIES)
def test_what_branches_do_is_done_once(name):
    """The text has a call for each op, not for each branch."""
    clean = Repeat((DeadCode(), CommonSubexpressions(), MERGE))  # no checks of dtypes, no repeats: as in the pipeline
    also = [torch.randn(3, WIDTH), 100 * X]
    found = merged(Ensemble(lambda i: Body(BODIES[name])), X, what=clean, also=also)
    assert len(found.ops) < 20
    assert all(found.ops.count(op) < COUNT for op in found.ops)


def test_scale_and_shift_of_norms_are_one_call():
    model = Ensemble(lambda i: Body(BODIES["layer norm"]), lambda ys: torch.stack(ys).relu())
    merged(model, X, ["expand", "baddbmm", "layer_norm", "addcmul", "relu"])


def test_a_norm_that_branches_share_keeps_its_weights():
    norm = nn.LayerNorm(WIDTH)
    model = Ensemble(lambda i: nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU()))
    found = merged(model, X, ["expand", "baddbmm", "layer_norm", "relu"])
    assert sum(1 for name in found.after.weights if name.endswith("stacked")) == 2


def test_a_number_that_the_model_computes_is_shared_by_the_branches():
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(COUNT)]

    def model(x, number):
        return torch.stack([F.linear(x, weight).relu() * number.item() for weight in weights])

    clean = Repeat((DeadCode(), CommonSubexpressions(), MERGE))
    found = merged(model, (X, torch.tensor(0.25)), what=clean)
    assert sorted(found.ops) == ["expand", "item", "matmul", "mul.Tensor", "relu"]


def test_numbers_that_branches_compute_for_themselves_are_not_stacked():
    """The layers before them are one all the same."""
    model = Ensemble(lambda i: Body(lambda h, p, q: h.relu().tanh().exp() * q.sum().item()))
    found = merged(model, X)
    assert found.ops.count("baddbmm") == 1
    assert found.ops.count("mul.Tensor") == COUNT


class SizedTwice(nn.Module):
    """Norms that reshape to sizes of which one is computed in one of them, and known in another."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        return F.instance_norm(x), F.channel_shuffle(x, 2), self.norm(x)


def test_calls_that_read_different_numbers_of_values_are_no_branches():
    model, inputs = SizedTwice().eval(), [torch.randn(rows, 4, 15, 17) for rows in (1, 2, 3)]
    program = tsopt.transform(tsopt.capture(model, inputs[:2]))
    fast = tsopt.compile(program, "eager")
    for x in inputs:
        torch.testing.assert_close(fast(x), model(x))
