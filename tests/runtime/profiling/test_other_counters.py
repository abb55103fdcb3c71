"""MACs and parameters are those that fvcore and torchinfo count, of the models that these can read."""

from __future__ import annotations

import logging
from functools import cache

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


@cache
def counted(name):
    model, example = MODELS[name].load()
    program = tsopt.capture(model, example)
    return model, example, OpWork(program, flat_inputs(program, example))


@cache
def summary(name):
    model, example, _ = counted(name)
    return torchinfo.summary(model, input_data=list(example.args), verbose=0)


@pytest.mark.parametrize("name", [*OF_IMAGES, "vit_b16"])
def test_macs_are_those_of_fvcore(name):
    model, example, work = counted(name)
    theirs = FlopCountAnalysis(model, example.args).unsupported_ops_warnings(False).by_operator()
    mine = work.of([node for node in work if ATTENTION not in ops.name_of(node)]).macs
    assert mine == sum(theirs[name] for name in PRODUCTS)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_macs_are_those_of_torchinfo(name):
    model, example, work = counted(name)
    vectors = sum(value.numel() for value in model.parameters() if value.ndim == 1)
    macs = work.of(list(work)).macs
    assert macs + vectors == summary(name).total_mult_adds  # it counts biases and factors of norms, too
    assert macs_of_call(model, *example.args) == macs


@pytest.mark.parametrize("name", OF_IMAGES)
def test_weights_are_the_parameters_and_the_statistics_of_norms(name):
    model, _, work = counted(name)
    statistics = sum(value.nbytes for buffer, value in model.named_buffers() if "running" in buffer)
    parameters = summary(name).total_params
    assert parameters == parameter_count(model)[""]
    assert work.of(list(work)).weights == 4 * parameters + statistics
