"""Variants of a CUDA graph: memory formats of weights, biases, and which of them is taken."""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsopt
from tests.runtime.backends.gpu_imitation import IMAGE, Block, Convolutions, recorded
from tsopt.compiler.graph.program import Program
from tsopt.runtime.backends import cudagraph
from tsopt.runtime.backends.cudagraph import CudaGraphBackend
from tsopt.runtime.backends.gpu_variants import Variant, applicable, function_of
from tsopt.runtime.backends.recorded import Recorded
from tsopt.runtime.bundles.opening import open_bundle
from tsopt.runtime.bundles.store import VARIANTS


@pytest.fixture
def faster(imitation, monkeypatch):
    """Sets how long properties of a variant make it take, 1 without any. Keeps what is recorded."""
    factors, tried = {}, []

    def function(program, variant):
        tried.append(variant)
        return function_of(program, variant)

    def seconds(recorded):
        return math.prod(value for key, value in factors.items() if all(getattr(recorded.variant, k) for k in key))

    class Known(Recorded):
        def __init__(self, *args):
            self.variant = tried[-1]
            super().__init__(*args)

    monkeypatch.setattr(cudagraph, "function_of", function)
    monkeypatch.setattr(cudagraph, "Recorded", Known)
    monkeypatch.setattr(cudagraph, "_seconds", seconds)

    def said(found):
        factors.update({tuple(key.split(" and ")): value for key, value in found.items()})
        return tried

    return said


@pytest.mark.parametrize(("seconds", "last"), [(0.9, True), (0.99, False), (1.1, False)])
def test_the_faster_memory_format_is_taken_and_stored(faster, seconds, last):
    faster({"channels_last": seconds})
    model = Convolutions()
    made = recorded(model, IMAGE)
    assert made.options == {"precision": "fp32", **asdict(Variant(channels_last=last))}
    assert ("convolutions in channels_last" in made.notes) is last
    found = made(IMAGE)
    torch.testing.assert_close(found, model(IMAGE).detach())
    assert found.is_contiguous(), "as the caller is used to"


@pytest.mark.parametrize("last", [True, False])
def test_a_format_that_is_asked_for_is_the_only_one(faster, last):
    tried = faster({})
    made = CudaGraphBackend(channels_last=last, fused=False).compile(tsopt.capture(Convolutions(), (IMAGE,)))
    assert (tried, made.options["channels_last"]) == ([Variant(channels_last=last)], last)


@pytest.mark.parametrize("end", [lambda y: y.view(2, -1), lambda y: torch.as_strided(y, (2, 2), (1, 1))])
def test_where_views_need_the_layout_it_stays(faster, end):
    faster({"channels_last": 0.1})
    model = Convolutions(end)
    made = recorded(model, IMAGE)
    assert made.options["channels_last"] is False
    torch.testing.assert_close(made(IMAGE), model(IMAGE).detach())


def test_without_convolutions_and_linear_layers_there_is_one_variant(faster):
    tried = faster({})
    recorded(nn.ReLU(), torch.ones(1, 3))
    assert tried == [Variant()]


class Tied(nn.Module):
    """A linear layer of its own, and one that shares its weight with an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.eval()

    def forward(self, tokens):
        return nn.functional.linear(self.inner(self.words(tokens)), self.words.weight)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"transposed": 0.9}, Variant(transposed=True)),
        ({"transposed": 0.99}, Variant()),
        ({"separate_bias": 0.9}, Variant(separate_bias=True)),
        (
            {"transposed": 1.1, "separate_bias": 1.1, "transposed and separate_bias": 0.5},
            Variant(transposed=True, separate_bias=True),
        ),
    ],
)
def test_linear_layers_are_computed_in_the_faster_of_four_ways(faster, seconds, chosen):
    tried = faster(seconds)
    model, tokens = Tied(), torch.tensor([[1, 4]])
    made = recorded(model, tokens)
    assert (made.options, len(tried)) == ({"precision": "fp32", **asdict(chosen)}, 4)
    assert ("weights of linear layers transposed in memory" in made.notes) is chosen.transposed
    assert ("biases of linear layers added separately" in made.notes) is chosen.separate_bias
    torch.testing.assert_close(made(tokens), model(tokens).detach())


def test_linear_layers_read_a_copy_where_others_read_the_weight_too(monkeypatch):
    program = tsopt.capture(Tied(), (torch.tensor([[1, 4]]),))
    laid_out = []
    monkeypatch.setattr(Program, "module", lambda made: laid_out.append(made) or SimpleNamespace(forward=None))
    function_of(program, Variant(transposed=True))
    assert {name: laid_out[0].weights[name].is_contiguous() for name in laid_out[0].used_weights()} == {
        "words.weight": True,
        "words.weight.transposed": False,
        "inner.weight.transposed": False,
        "inner.bias": True,
    }
    assert all(weight.is_contiguous() for weight in program.weights.values()), "the model's own"


def test_convolutions_apply_what_follows_them(monkeypatch):
    """cuDNN is imitated: a CPU does not have these calls."""
    calls = []

    def plain(image, weight, bias, *how):
        return F.conv2d(image, weight, bias, *how).relu()

    def with_sum(image, weight, other, alpha, bias, *how):
        return (F.conv2d(image, weight, bias, *how) + other * alpha).relu()

    aten = torch.ops.aten
    imitated = {aten.cudnn_convolution_relu.default: plain, aten.cudnn_convolution_add_relu.default: with_sum}

    def module(program):
        for node in program.graph.nodes:
            calls.append(node.target)
            node.target = imitated.get(node.target, node.target)
        return real(program)

    real = Program.module
    monkeypatch.setattr(Program, "module", module)
    model = Block()
    program = tsopt.transform(tsopt.capture(model, (IMAGE,)))
    assert applicable(program)["fused"]
    found = function_of(program, Variant(fused=True))(IMAGE)
    torch.testing.assert_close(found[0], model(IMAGE).detach())
    convolutions = [target for target in calls if "conv" in str(target)]
    assert convolutions == [
        aten.cudnn_convolution_relu.default,
        aten.cudnn_convolution_add_relu.default,
        aten.cudnn_convolution_relu.default,
        aten.conv2d.default,  # torch has kernels of its own for depthwise ones
    ]
    assert calls.count(aten.relu.default) == 1


@pytest.mark.parametrize("setting", ["enabled", "deterministic"])
def test_settings_of_cudnn_are_heeded(monkeypatch, setting):
    program = tsopt.capture(Block(), (IMAGE,))
    assert applicable(program)["fused"]
    monkeypatch.setattr(torch.backends.cudnn, setting, setting != "enabled")
    assert not applicable(program)["fused"]


def test_what_a_bundle_may_say_are_the_properties_of_a_variant():
    assert tuple(field.name for field in fields(Variant)) == VARIANTS


@pytest.mark.parametrize(
    "after",
    [
        lambda y, x: (y + x[..., :1]).relu(),
        lambda y, x: torch.add(y, x, alpha=2).relu(),
        lambda y, x: y.relu() + y,
        lambda y, x: y.clamp(-1, 1),
        lambda y, x: y.sigmoid(),
    ],
)
def test_what_cudnn_does_not_do_is_left_alone(after):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return after(self.layer(x), x)

    assert not applicable(tsopt.capture(Model().eval(), (IMAGE,)))["fused"]


def test_each_group_of_properties_is_tried_on_the_best_variant_so_far(faster):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.label = nn.Conv2d(3, 4, 3), nn.Linear(4, 2, bias=False)

        def forward(self, x):
            return self.label(self.image(x).mean((-2, -1)))

    tried = faster({"channels_last": 0.5, "transposed": 0.9})
    made = recorded(Both().eval(), IMAGE)
    assert tried == [Variant(), Variant(channels_last=True), Variant(channels_last=True, transposed=True)]
    torch.testing.assert_close(made(IMAGE).shape, torch.Size([2, 2]))


@pytest.mark.parametrize(
    ("call", "dtype", "separate"),
    [
        (lambda x, w, b: F.linear(x, w, b), torch.float32, True),
        (lambda x, w, b: torch.addmm(b, x, w), torch.float32, True),
        (lambda x, w, b: torch.addmm(b, x, w, alpha=2), torch.float32, False),
        (lambda x, w, b: torch.addmm(x, x, w), torch.float32, False),
        (lambda x, w, b: F.linear(x, w), torch.float32, False),
        (lambda x, w, b: F.linear(x, w, b), torch.bfloat16, False),
    ],
)
def test_a_bias_is_added_separately_where_no_sum_is_rounded_twice(call, dtype, separate):
    given = [torch.randn(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype), torch.randn(4, dtype=dtype)]
    program = tsopt.capture(call, tuple(given))
    assert applicable(program)["separate_bias"] is separate
    found = function_of(program, Variant(separate_bias=True))(*given[: len(program.signature.inputs)])
    torch.testing.assert_close(found[0], call(*given))


def test_a_bundle_is_recorded_again_in_its_layout_and_precision(faster, monkeypatch, tmp_path):
    faster({"channels_last": 0.5})
    made = CudaGraphBackend(precision="tf32").compile(tsopt.capture(Convolutions(), (IMAGE,)))
    made.save(tmp_path)
    opened = []
    monkeypatch.setattr(CudaGraphBackend, "unsupported", lambda self, program: [])  # on the CPU
    monkeypatch.setattr(CudaGraphBackend, "compile", lambda self, program: opened.append(self) or made)
    open_bundle(tmp_path, "cudagraph", made.options, made.signature, trust=False)
    assert opened == [CudaGraphBackend("tf32", True, False, False, False)]
