"""torch's own examples of what torch.export takes and refuses: each is right, or refused in our words."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from bench.untouched import changed, state_of

examples = pytest.importorskip("torch._export.db.examples")
CASES = examples.all_examples()
pytestmark = pytest.mark.filterwarnings("ignore")

# What is refused, and by which words. This list may only shrink.
REFUSED = {
    "assume_constant_result": "has a data-dependent output shape",
    "constrain_as_size_example": "uses a Python number computed from tensor values",
    "constrain_as_value_example": "uses a Python number computed from tensor values",
    "dynamic_shape_map": "control flow op map",
    "scalar_output": "the model does not return a tensor",
}


def load(name):
    case = CASES[name]
    model = case.model.eval() if isinstance(case.model, nn.Module) else case.model
    return model, tsopt.example(*case.example_args, **case.example_kwargs)


@pytest.mark.parametrize("name", sorted(set(CASES) - set(REFUSED)))
def test_it_is_right(name):
    model, call = load(name)
    before = state_of(model, call)
    program = tsopt.capture(model, call)
    made = tsopt.compile(tsopt.transform(program), "eager")
    assert tsopt.verify(model, made, call, program=program).ok
    assert not changed(before, state_of(model, call))


@pytest.mark.parametrize("name", sorted(set(CASES) & set(REFUSED)))
def test_it_is_refused_by_name(name):
    model, call = load(name)
    before = state_of(model, call)
    with pytest.raises(tsopt.CaptureError, match=REFUSED[name]) as caught:
        tsopt.capture(model, call)
    assert not changed(before, state_of(model, call))
    assert caught.value.fix
    assert "Traceback" not in str(caught.value)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", sorted(set(CASES) & set(REFUSED) - {"scalar_output"}))
def test_what_is_refused_as_a_graph_runs_all_the_same(name):
    model, call = load(name)
    before = state_of(model, call)
    fast = tsopt.optimize(model, call, seconds=0.02, isolate=False, cache=False, backends=("eager",))
    assert not changed(before, state_of(model, call))
    torch.testing.assert_close(fast(*call.args, **call.kwargs), model(*call.args, **call.kwargs))
