"""The scores of attention in the int8 variant with fixed scales: where they are integers, and why elsewhere not."""

from __future__ import annotations

import torch
from torch import nn

from tests.passes.quantize.test_scores import Attention, sequences
from tests.quantization.test_quantize import layers, quantized, records
from tsopt.compiler.graph.quantized import calibrated_input
from tsopt.compiler.graph.quantized_attention import attentions_of, operands_of
from tsopt.quantization import variants


def scores_of(found):
    return [layer.kept for layer in records(found) if layer.op == "scaled_dot_product_attention"]


def rounded_scores(found):
    program = found.variants["int8-static"]
    operands = [operand for node in attentions_of(program) for operand in operands_of(node)]
    return [operand for operand in operands if calibrated_input(operand)]


def test_scores_of_attention_are_in_int8_where_that_is_accurate_enough(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
    calls = sequences(16)
    found = quantized(Attention().eval(), calls[0], calibration=calls)
    assert scores_of(found) == [""]
    assert len(rounded_scores(found)) == 2
    assert layers(found.variants["int8-static"])


def test_scores_stay_in_float_where_the_criterion_or_the_user_wants_it(monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: True)
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
