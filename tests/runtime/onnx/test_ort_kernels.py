"""ONNX Runtime's own operators for composites: used where they compute the same, and in no .onnx file."""

from __future__ import annotations

import math

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.elsewhere import elsewhere
from tsopt.runtime.checking.inputs import exported
from tsopt.runtime.onnx.ort_kernels import with_own_operators

LENGTH, WIDTH, HEADS = 5, 32, 4


class Attention(nn.Module):
    def __init__(self, mask=None, *, causal=False, scale=None, heads=HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.causal, self.scale, self.heads = nn.Linear(WIDTH, 3 * WIDTH), causal, scale, heads
        self.register_buffer("mask", mask)
        self.eval()

    def forward(self, x, mask=None):
        n, length, _ = x.shape
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = self.mask if mask is None else mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal, scale=self.scale)
        return y.transpose(1, 2).reshape(n, length, WIDTH)


def operators(model, example, tmp_path, **options):
    """The runtime's own operators in the model that is run; it computes what the model computes."""
    program = tsopt.transform(tsopt.capture(model, example))
    executable = tsopt.compile(program, "onnxruntime", **options)
    tsopt.verify(model, executable, example)
    executable.save(tmp_path)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    return [node.op_type for node in nodes if node.domain or node.op_type == "SimplifiedLayerNormalization"]


X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
SOME = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
NONE = SOME.clone()
NONE[2] = False  # a row that attends to nothing: 0 by torch, NaN by softmax
KEYS = torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])[:, None, None]


@pytest.mark.sliced(4)
@pytest.mark.parametrize(
    ("model", "example"),
    [
        (Attention(), X),
        (Attention(scale=0.3), X),
        (Attention(causal=True), X),
        (Attention(SOME), X),
        (Attention(NONE), X),
        (Attention(torch.randn(1, HEADS, LENGTH, LENGTH)), X),
        (Attention(torch.zeros(LENGTH, LENGTH).masked_fill(~NONE, -math.inf)), X),
        (Attention(), (X, SOME)),
        (Attention(), (X, NONE[None, None])),
        (Attention(), (X, KEYS)),
        (Attention(), (X, torch.zeros(LENGTH, LENGTH).masked_fill(~NONE, -math.inf))),
        (Attention(heads=1), X),
        (Attention(), X[:1, :1]),
    ],
    ids=["plain", "scale", "causal", "constant", "constant empty row", "bias", "constant -inf", "computed",
         "computed empty row", "keys", "computed -inf", "one head", "one position"],
)  # fmt: skip
def test_attention_is_one_operator(model, example, tmp_path):
    assert operators(model, example, tmp_path) == ["MultiHeadAttention"]


@pytest.mark.sliced(1)
@pytest.mark.parametrize("shape", [(3, 7), (1,), (2, 1, 3)])
def test_silu_and_rms_norm_are_one_operator(shape, tmp_path):
    x = torch.randn(shape)
    assert operators(nn.SiLU(), x, tmp_path) == ["QuickGelu"]
    assert operators(nn.RMSNorm(shape[-1], eps=1e-5), x, tmp_path) == ["SimplifiedLayerNormalization"]
    assert operators(nn.RMSNorm(shape[-1], elementwise_affine=False), x, tmp_path) == ["SimplifiedLayerNormalization"]


def _grouped(x):
    q, k = x.view(2, LENGTH, HEADS, 8).transpose(1, 2), x[..., :16].reshape(2, LENGTH, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)


@pytest.mark.parametrize(
    ("model", "example"),
    [
        (_grouped, X),
        (
            lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
            (torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4)),
        ),
        (lambda x: F.rms_norm(x, (4, 8)), torch.randn(3, 4, 8)),
    ],
    ids=["grouped heads", "causal of two lengths", "norm over two axes"],
)
def test_what_the_operators_do_not_do_is_left_to_the_exporter(model, example, tmp_path):
    assert operators(model, example, tmp_path) == []


@pytest.mark.sliced(3)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
@pytest.mark.parametrize("masked", [True, False])
def test_attention_with_other_than_four_axes_is_taken(lead, masked, fused, tmp_path):
    def model(x, mask=None):
        return F.scaled_dot_product_attention(x, x + 1, x * 2, attn_mask=mask)

    x = torch.randn(*lead, 4, 8)
    example = (x, torch.randn(4, 4)) if masked else (x,)
    assert operators(model, example, tmp_path, fused=fused) == ["MultiHeadAttention"] * fused


def test_attention_whose_number_of_heads_is_a_size_is_left_to_the_exporter():
    """Attributes of an operator are constants. Without an axis of heads, those of the batch are taken for it."""

    def model(q, k):
        return torch.softmax(q @ k.transpose(1, 2), -1) @ k

    def call(rows, keys):
        return tsopt.example(torch.randn(rows, 1, 8), torch.randn(rows, keys, 8))

    compiled = tsopt.compile(tsopt.capture(model, [call(2, 4), call(3, 6)]), "onnxruntime")
    for rows, keys in ((1, 5), (4, 9)):
        args = call(rows, keys).args
        torch.testing.assert_close(compiled(*args), model(*args))


def test_another_precision_is_left_to_the_exporter(tmp_path):
    assert operators(nn.RMSNorm(3, eps=1e-5).double(), torch.randn(2, 3).double(), tmp_path) == []


def test_standard_operators_alone_when_asked(tmp_path):
    assert operators(nn.SiLU(), torch.randn(3), tmp_path, fused=False) == []
    assert operators(Attention(), X, tmp_path, fused=False) == []


def test_a_bundle_keeps_the_operators(tmp_path):
    fast = tsopt.optimize(Attention(), X, backends=("onnxruntime",), seconds=0.1)
    fast.executable = tsopt.compile(fast.program, "onnxruntime")
    torch.testing.assert_close(tsopt.load(fast.save(tmp_path / "m.tsopt"))(X), Attention()(X).detach())


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Attention(), (X,)),
        (Attention(), (X, SOME)),
        (Net(lambda self, x: self.w(F.silu(x)), w=nn.Linear(WIDTH, WIDTH)), (X,)),
        (Net(lambda self, x: self.w(F.rms_norm(x, (WIDTH,))), w=nn.Linear(WIDTH, WIDTH)), (X,)),
    ],
    ids=["attention", "mask", "silu", "norm without weight"],
)
def test_they_are_exported_for_a_model_on_another_device(model, inputs):
    lowered = with_own_operators(elsewhere(tsopt.capture(model, inputs)))
    made = exported(lowered)
    assert any("symbolic" in str(node.target) for node in made.graph.nodes)
    assert {value.device.type for value in lowered.weights.values()} == {"meta"}
