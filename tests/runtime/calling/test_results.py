"""What results share memory with is what it is in eager, whichever engine runs: inputs, each other, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from bench.hazards.results import FUNCTIONS, Model, differs

BACKENDS = ("eager", "torchscript", "onnxruntime", "openvino")


def inputs(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


@pytest.mark.sliced(8)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_written_to_a_result_shows_where_it_does_in_eager(name, backend):
    model, reference = Model(FUNCTIONS[name]).eval(), Model(FUNCTIONS[name]).eval()
    executable = tsopt.compile(tsopt.transform(tsopt.capture(model, inputs()[0])), backend)
    assert differs(executable, reference, inputs()) == ""


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", ["a transposed input", "a buffer that is written", "a copy of a weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_and_so_does_a_bundle(name, backend, tmp_path):
    model, reference = Model(FUNCTIONS[name]).eval(), Model(FUNCTIONS[name]).eval()
    fast = tsopt.optimize(model, inputs()[0], backends=("eager",), seconds=0.05, isolate=False, cache=False)
    fast.executable = tsopt.compile(fast.program, backend)
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"), trust=True)
    assert differs(loaded, reference, inputs()) == ""


def test_a_call_of_another_layout_gets_a_copy_of_the_right_values():
    executable = tsopt.compile(tsopt.capture(lambda x: x.view(-1), inputs()[0]), "onnxruntime")
    x = inputs()[0].t().contiguous().t()
    assert torch.equal(executable(x), x.reshape(-1))


def test_a_whole_input_is_handed_back_in_any_size():
    program = tsopt.capture(lambda x: (x, x * 2), inputs()[0], dynamic={"x": {0: "rows"}})
    executable = tsopt.compile(program, "onnxruntime")
    x = torch.randn(5, 4)
    assert executable(x)[0] is x


def test_weights_that_are_returned_are_copies():
    """Against eager, which returns the parameter: what was made owns its weights."""
    model = nn.Linear(4, 4).eval().requires_grad_(False)
    executable = tsopt.compile(tsopt.capture(lambda x: (x * 2, model.weight), inputs()[0]), "eager", share_weights=True)
    executable(inputs()[0])[1].zero_()
    assert model.weight.abs().sum() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_outlive_the_calls_behind_them(backend):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval().requires_grad_(False)
    executable = tsopt.compile(tsopt.capture(model, inputs()[0]), backend)
    results = [executable(x) for x in inputs()]
    for x, found in zip(inputs(), results, strict=True):
        torch.testing.assert_close(found, model(x))
