"""What results share memory with is what it is in eager, whichever engine runs: inputs, each other, nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from bench.hazards.results import FUNCTIONS, Model, differs

BACKENDS = ("eager", "torchscript", "onnxruntime", "openvino")
# Functions, by how many sizes are dynamic, that are right at one size only.
OF_ONE_SIZE = {
    *(("halves of a result", 1), ("halves of a result", 2)),
    *(("a buffer that is written", 2), ("a part of a buffer that is written", 2)),
}


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


@pytest.mark.sliced(8)
@pytest.mark.parametrize("dynamic", [{"x": {0: "n"}}, {"x": {0: "n", 1: "m"}}], ids=["n", "nm"])
@pytest.mark.parametrize("backend", BACKENDS[:3])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_so_it_does_for_many_sizes(name, backend, dynamic):
    model, reference = Model(FUNCTIONS[name]).eval(), Model(FUNCTIONS[name]).eval()
    if (name, len(dynamic["x"])) in OF_ONE_SIZE:
        with pytest.raises(tsopt.CaptureError):
            tsopt.capture(model, torch.randn(3, 4), dynamic=dynamic)
        return
    program = tsopt.transform(tsopt.capture(model, torch.randn(3, 4), dynamic=dynamic))
    calls = [torch.randn(rows, 4) for rows in (2, 5, 3, 1, 9)]
    assert differs(tsopt.compile(program, backend), reference, calls) == ""


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", ["a transposed input", "a buffer that is written", "a copy of a weight"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_and_so_does_a_bundle(name, backend, tmp_path):
    model, reference = Model(FUNCTIONS[name]).eval(), Model(FUNCTIONS[name]).eval()
    fast = tsopt.optimize(model, inputs()[0], backends=("eager",), seconds=0.05, isolate=False, cache=False)
    fast.executable = tsopt.compile(fast.program, backend)
    loaded = tsopt.load(fast.save(tmp_path / "m.tsopt"), trust=True)
    assert differs(loaded, reference, inputs()) == ""


@pytest.mark.parametrize("transposed", [False, True])
def test_a_call_of_another_layout_is_another_signature_where_a_result_is_a_view_of_it(transposed):
    first, other = inputs()[0], inputs()[1].t().contiguous().t()
    first, other = (other, first) if transposed else (first, other)
    executable = tsopt.compile(tsopt.capture(lambda x: (x + 1, x[0]), first), "onnxruntime")
    assert executable.accepts((first,), {}) is not None
    assert executable.accepts((other,), {}) is None
    with pytest.raises(tsopt.SignatureError, match="input 'x' has other strides than in the example"):
        executable(other)


def test_a_call_of_another_layout_gets_a_view_as_well(always_faster):
    options = {"backends": ("torchscript",), "seconds": 0.05, "isolate": False, "cache": False}
    fast = tsopt.optimize(lambda x: (x.tanh(), x[0]), inputs()[0], **options)
    x = inputs()[0].t().contiguous().t()
    for _ in range(2):
        assert fast(x)[1].data_ptr() == x[0].data_ptr()
    assert len(fast.report.signatures) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_stored_in_an_argument_is_what_the_model_stores(backend):
    def function(x, held):
        held["x"], held["row"], held["new"] = x, x[1], x * 2
        return x + 1, x[0], x, held["new"][0]

    x, held = inputs()[0], {"a": 1}
    executable = tsopt.compile(tsopt.capture(function, (x, dict(held))), backend)
    _, row, same, new = executable(x, held)
    assert same is x
    assert held["x"] is x
    places = [(row, x), (held["row"], x[1]), (new, held["new"])]
    assert all(mine.data_ptr() == other.data_ptr() for mine, other in places)
    assert torch.equal(held["new"], x * 2)


def test_a_tensor_whose_elements_share_memory_is_written_by_the_model(always_faster):
    def function(x):
        x[0].add_(1)
        return x.tanh()

    options = {"backends": ("torchscript",), "seconds": 0.05, "isolate": False, "cache": False}
    fast = tsopt.optimize(function, inputs()[0], **options)
    mine, wanted = torch.zeros(1, 4).expand(2, 4), torch.zeros(1, 4).expand(2, 4)
    assert fast.executable.accepts((mine,), {}) is None
    assert torch.equal(fast(mine), function(wanted))
    assert torch.equal(mine, wanted)
    with pytest.raises(tsopt.SignatureError, match="elements of input 'x' share memory"):
        fast.executable(mine)
    with pytest.raises(tsopt.CaptureError, match="elements of an input share memory, and the model writes to it"):
        tsopt.capture(function, mine)
    assert fast.executable.accepts((inputs()[0][:, :1].expand(2, 4).contiguous(),), {}) is not None


def test_one_tensor_in_two_places_of_the_example_is_two_inputs():
    first, second = inputs()[:2]
    executable = tsopt.compile(tsopt.capture(lambda x, y: (x + y, y, x[0]), (first, first)), "onnxruntime")
    _, same, row = executable(first, second)
    assert same is second
    assert row.data_ptr() == first.data_ptr()


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
