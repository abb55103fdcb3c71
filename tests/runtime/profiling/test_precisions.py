"""Which layers an engine computes in which precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.graph.program import Numerics
from tsopt.compiler.rewriting.pass_base import Limits
from tsopt.compiler.rewriting.pipeline import run
from tsopt.passes.lower_precision import in_precision
from tsopt.passes.quantize.layers import layers_of
from tsopt.passes.quantize.weights import Int8Weights
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.profiling.precisions import precisions_of


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(self.a(x).exp())


@pytest.fixture
def program():
    return tsopt.capture(Two().eval(), torch.randn(2, 8))


def by_module(found):
    return {where.partition(",")[0]: precision for where, precision in found.known.items()}


@pytest.mark.parametrize("spec", ["eager", "openvino", "onnxruntime?threads=1"])
def test_most_engines_compute_in_float32(program, spec):
    found = precisions_of(Candidate.parse(spec), program)
    assert (dict(found.known), found.others) == ({}, "fp32")


def test_an_engine_may_lower_all_of_them(program):
    found = precisions_of(Candidate.parse("openvino?precision=bf16"), program)
    assert (dict(found.known), found.of("anything")) == ({}, "bf16")


def test_of_a_variant_those_that_are_written_in_it(program):
    made = in_precision(program, "bf16", keep_float=["b"])
    found = precisions_of(Candidate("eager", variant="bf16"), made)
    assert by_module(found)["a"] == "bf16"
    assert "b" not in by_module(found)
    assert found.others == "fp32"


def test_of_int8_the_quantized_layers_and_others_as_the_engine_is_told(program):
    first = layers_of(program)[0].name
    made, _ = run(program, (Int8Weights(frozenset({first})),), Limits(Numerics.LOSSY))
    found = precisions_of(Candidate.parse("openvino?precision=int8-weights&other_ops=bf16"), made)
    assert by_module(found) == {"a": "int8-weights"}
    assert found.others == "bf16"
