"""MACs and parameters are those that fvcore and torchinfo count, of the models that these can read."""

from __future__ import annotations

import logging

import pytest
import torchinfo
from fvcore.nn import FlopCountAnalysis, parameter_count

import tsopt
from bench.models import MODELS
from tsopt.compiler.graph import ops
from tsopt.compiler.graph.values import flat_inputs
from tsopt.runtime.profiling.work import OpWork, macs_of_call

logging.getLogger("fvcore").setLevel(logging.ERROR)  # it names the modules that a call does not reach
PRODUCTS = ("conv", "linear", "addmm", "matmul", "bmm")  # of what fvcore counts; elementwise ops are no MACs here
ATTENTION = "scaled_dot_product_attention"  # which neither of the two knows
OF_IMAGES = ("mlp", "resnet18", "mobilenet_v2")  # torchinfo multiplies linear layers by the batch, not by a sequence


@pytest.mark.parametrize("name", [*OF_IMAGES, pytest.param("vit_b16", marks=pytest.mark.slow)])
def test_what_is_counted(name):
    model, example = MODELS[name].load()
    program = tsopt.capture(model, example)
    work = OpWork(program, flat_inputs(program, example))
    of_fvcore = FlopCountAnalysis(model, example.args).unsupported_ops_warnings(False).by_operator()
    without_attention = work.of([node for node in work if ATTENTION not in ops.name_of(node)])
    assert without_attention.macs == sum(of_fvcore[name] for name in PRODUCTS)
    if name not in OF_IMAGES:
        return
    found, of_torchinfo = work.of(list(work)), torchinfo.summary(model, input_data=list(example.args), verbose=0)
    vectors = sum(value.numel() for value in model.parameters() if value.ndim == 1)
    assert found.macs + vectors == of_torchinfo.total_mult_adds  # it counts biases and factors of norms, too
    assert found.macs == macs_of_call(model, *example.args)
    statistics = sum(value.nbytes for buffer, value in model.named_buffers() if "running" in buffer)
    assert of_torchinfo.total_params == parameter_count(model)[""]
    assert found.weights == 4 * of_torchinfo.total_params + statistics
