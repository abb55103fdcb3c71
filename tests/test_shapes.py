"""Models of many shapes end to end: right by torch and by ONNX Runtime or refused by name, and left as they were."""

from __future__ import annotations

import pytest
import torch

import tsopt
from bench.untouched import changed, state_of
from tests.shapes import SHAPES
from tsopt.compiler.calls.structure import flatten
from tsopt.compiler.sizes.dims import resized
from tsopt.runtime.checking.held_out_sizes import validate_ranges

ONE_GRAPH = [name for name, item in SHAPES.items() if item.one_graph]
pytestmark = pytest.mark.filterwarnings("ignore")


def test_there_are_enough():
    assert len(SHAPES) >= 25


@pytest.mark.sliced(5)
@pytest.mark.parametrize("name", ONE_GRAPH)
def test_one_graph_by_torch_and_by_onnx_runtime(name):
    model, call = SHAPES[name].load()
    before = state_of(model, call)
    program = tsopt.capture(model, call)
    better = tsopt.transform(program)
    assert tsopt.verify(model, tsopt.compile(better, "eager"), call, program=program).ok
    assert tsopt.verify(model, tsopt.compile(better, "onnxruntime"), call, program=program).ok
    assert not changed(before, state_of(model, call))


# Whose inputs do not begin with one batch, whose batch torch.export takes for a number, or who decide by values.
ONE_BATCH = {"LstmWithState", "BidirectionalGru", "ScriptedByValues"}


@pytest.mark.sliced(4)
@pytest.mark.parametrize("name", [name for name in ONE_GRAPH if name not in ONE_BATCH])
def test_for_any_batch(name):
    model, call = SHAPES[name].load()
    leaves, _ = flatten((call.args, call.kwargs))
    batched = {(i, 0): leaf.shape[0] + 3 for i, leaf in enumerate(leaves) if leaf.shape[:1] == leaves[0].shape[:1]}
    other = resized(call, batched)
    found = validate_ranges(model, tsopt.capture(model, [call, other]), call, other, seed=0)
    better = tsopt.transform(found.program)
    assert found.checked_with(better)
    assert found.program.signature.dims[0].high >= leaves[0].shape[0] + 3


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ONE_GRAPH])
def test_what_is_no_single_graph_is_right_in_parts_and_refused_by_name_as_one(name):
    model, call = SHAPES[name].load()
    before = state_of(model, call)
    with pytest.raises(tsopt.GraphBreakError):
        tsopt.capture(model, call)
    fast = tsopt.optimize(model, call, seconds=0.02, isolate=False, cache=False, backends=("eager",))
    assert not changed(before, state_of(model, call))
    for seed in range(3):
        torch.manual_seed(seed)
        args = [torch.rand_like(value) * 3 if value.is_floating_point() else value for value in call.args]
        torch.testing.assert_close(fast(*args), model(*args))
