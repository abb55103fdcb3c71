"""The scores of attention in the int8 variant with fixed scales: where they are integers, and why elsewhere not."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import nn

from tests.compiler.helpers import Net
from tests.passes.quantize.models import Attention, Convolved, mlp, seeded, sequences
from tests.quantization.test_quantize import layers, quantized, records
from tsopt.compiler.graph.quantized import calibrated_input
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.compiler.precision_names import INT8_STATIC
from tsopt.quantization import quantize, variants
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.calling.executable import Executable
from tsopt.runtime.layer_table import ATTENTION


def scores_of(found):
    return [layer.kept for layer in records(found) if layer.op == "scaled_dot_product_attention"]


def rounded_scores(found):
    program = found.variants["int8-static"]
    operands = [operand for node in attentions_of(program) for operand in operands_of(node)]
    return [operand for operand in operands if calibrated_input(operand)]


@pytest.fixture(autouse=True)
def vnni(monkeypatch):
    """A processor on which sums of 8-bit products are exact."""
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)


def test_scores_of_attention_are_in_int8_where_that_is_accurate_enough():
    calls = sequences(16)
    found = quantized(Attention().eval(), calls[0], calibration=calls)
    assert scores_of(found) == [""]
    assert len(rounded_scores(found)) == 2
    assert layers(found.variants["int8-static"])


def test_scores_stay_in_float_where_the_criterion_or_the_user_wants_it(monkeypatch):
    calls = sequences(16)
    two = nn.Sequential(Attention(), Attention()).eval()
    kept = quantized(two, calls[0], calibration=calls, keep_float=("1",))
    assert scores_of(kept) == ["", "keep_float '1'"]
    assert len(rounded_scores(kept)) == 2

    judged = []

    def safe(judgement):
        judged.append(judgement)
        return len(judged) == 1  # of the layers by themselves

    monkeypatch.setattr(variants, "_is_safe", safe)
    (reason,) = scores_of(quantized(Attention().eval(), calls[0], calibration=calls, wanted=("int8-static",)))
    assert reason.startswith("with the scores of attention in int8: relative error")


def test_scores_stay_in_float_where_sums_could_saturate(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    calls = sequences(16)
    found = quantized(Attention().eval(), calls[0], calibration=calls)
    assert scores_of(found) == []
    assert not rounded_scores(found)


class Alone(nn.Module):
    """Attention in a module of its own, beside a layer."""

    class Core(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.core = nn.Linear(16, 16), self.Core()

    def forward(self, x):
        return self.core(self.layer(x))


def test_a_pattern_may_name_attention():
    calls = sequences(8)
    found = quantized(Alone().eval(), calls[0], calibration=calls, keep_float=("core",))
    assert scores_of(found) == ["keep_float 'core'"]
    assert layers(found.variants["int8-static"])


def test_queries_that_are_not_finite_stay_in_float():
    def model(x):
        return nn.functional.scaled_dot_product_attention(x / 0, x, x), nn.functional.linear(x, weight)

    weight = torch.randn(8, 16, generator=seeded(0))
    calls = sequences(8)
    found = quantized(Net(lambda self, x: model(x)), calls[0], calibration=calls)
    assert scores_of(found) == [variants.NOT_FINITE]


def test_queries_that_are_rounded_for_a_convolution_are_not_rounded_again():
    calls = sequences(8)
    found = quantized(Convolved().eval(), calls[0], calibration=calls)
    assert scores_of(found) == ["its queries or keys are already rounded for a layer"]


def test_without_time_for_the_scores_the_variant_stays(monkeypatch):
    calls = sequences(8)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Clocked(variants.Quantizer):
        def with_scores(self, *given):
            now[0] = math.inf
            return super().with_scores(*given)

    monkeypatch.setattr(quantize, "Quantizer", Clocked)
    found = quantized(Attention().eval(), calls[0], calibration=calls, wanted=("int8-static",), seconds=1e9)
    assert layers(found.variants["int8-static"])
    assert scores_of(found) == []


def test_the_report_says_what_the_engine_does():
    calls = sequences(8)
    found = quantized(Attention().eval(), calls[0], calibration=calls)
    kept = {
        backend: [
            item.kept for item in found.layers_for(Candidate(backend, variant=INT8_STATIC)) if item.op == ATTENTION
        ]
        for backend in ("openvino", "onnxruntime")
    }
    assert kept == {"openvino": [""], "onnxruntime": ["ONNX Runtime computes attention in float32"]}
    assert found.layers_for(None) == found.layers_in("fp32")


def test_the_report_counts_only_layers_that_the_engine_runs_on_integers():
    calls = [torch.randn(2, 16, generator=seeded(i)) for i in range(8)]
    found = quantized(mlp(16, 16, 16, 16), calls[0], calibration=calls, keep_float=("2",), wanted=("int8",))
    engine, compiled = Candidate("onednn", variant="int8"), Executable("onednn", found.variants["int8"].signature, list)

    def kept(runs):
        compiled.int8 = runs
        return [bool(item.kept) for item in found.layers_for(engine, compiled)]

    assert kept(()) == [False, True, False], "an engine that does not choose"
    assert kept((True, False)) == [False, True, True]
    assert kept((False, True)) == [True, True, False]
