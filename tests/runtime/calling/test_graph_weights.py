"""The weights of a graph: which writes are noticed, and how."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tsopt.runtime.calling import graph_weights
from tsopt.runtime.calling.graph_weights import Constants, GraphWeights, silently_written


@pytest.fixture
def clock(monkeypatch):
    """What time it is: a look at the statistics takes a second."""
    now = [0.0]

    def read():
        now[0] += 0.5
        return now[0]

    monkeypatch.setattr(graph_weights, "_clock", read)
    return now


def of(layer):
    """The tensors that TorchDynamo passes to a graph of eval mode."""
    return [*layer.parameters(), *(buffer for buffer in layer.buffers() if buffer.dim())]


def watched(layer):
    return GraphWeights(dict(enumerate(of(layer))))


def test_the_counter_of_a_batch_norm_says_that_its_statistics_were_written(clock):
    layer = nn.BatchNorm1d(4)
    weights, version = watched(layer), layer.running_mean._version
    assert weights.are(of(layer))
    with torch.no_grad():
        layer(torch.randn(3, 4))
    assert layer.running_mean._version == version, "or this test tests nothing"
    assert not weights.are(of(layer))


def test_a_counter_that_counts_alone_is_no_change(clock):
    layer = nn.BatchNorm1d(4)
    weights = watched(layer)
    for _ in range(3):
        layer.num_batches_tracked.add_(1)
        assert weights.are(of(layer))


def test_statistics_without_a_counter_are_compared_now_and_then(clock):
    layer = nn.BatchNorm1d(4)
    layer.num_batches_tracked = None
    weights = watched(layer)
    F.batch_norm(torch.randn(3, 4), layer.running_mean, layer.running_var, training=True)
    assert weights.are(of(layer)), "one look takes a hundredth of the time"
    clock[0] += 100
    assert not weights.are(of(layer))
    assert not weights.are(of(layer))


def test_weights_are_not_kept_alive_and_what_comes_in_their_place_is_not_taken_for_them():
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    weights, there = GraphWeights({0: first, 2: second}), weakref.ref(first)
    assert weights.are([first, None, second])
    del first
    assert there() is None
    assert weights.is_gone
    assert not any(weights.are([nn.Parameter(torch.ones(4)), None, second]) for _ in range(20))


def test_statistics_are_not_kept_alive():
    layer = nn.BatchNorm1d(4, affine=False)
    weights, there = watched(layer), [weakref.ref(buffer) for buffer in layer.buffers()]
    del layer
    assert [buffer() for buffer in there] == [None] * 3
    assert weights.is_gone


def constants(function, *args, owned=(), known=()):
    """The positions of the constants among the arguments; `owned` are marked as TorchDynamo does it."""
    for i in owned:
        torch._dynamo.mark_static_address(args[i])
    return sorted(Constants(function, ()).among(args, known))


def test_what_the_graph_writes_and_what_shares_its_memory_is_no_constant():
    state, weight = torch.zeros(4), nn.Parameter(torch.ones(4))
    other = state[1:]

    def writes(x, state, weight, other):
        state[:2].add_(x.sum() * weight[:2])
        return state + other.sum()

    assert constants(writes, torch.ones(4), state, weight, other, owned=(1, 3)) == [2]
    assert torch.equal(state, torch.zeros(4)), "nothing is written to find that out"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_written_is_told_in_any_mode(mode):
    state, weight = torch.zeros(4), nn.Parameter(torch.ones(4))
    with mode():
        x = torch.ones(4)
        assert constants(lambda x, state, weight: state.add_(x) * weight, x, state, weight, owned=(1,)) == [2]
        assert constants(lambda x, state, weight: weight.mul_(2) * state, x, state, weight, owned=(1,)) == [1]


def test_buffers_that_others_write_are_inputs_unless_parameters_change_as_well():
    args = [torch.ones(4), torch.zeros(4), nn.Parameter(torch.ones(4))]
    torch._dynamo.mark_static_address(args[1])
    found = Constants(lambda x, state, weight: x * state * weight, ())
    for written, left in (((1, 2), [1, 2]), ((2,), [1, 2]), ((), [1, 2]), ((1,), [2])):
        weights = GraphWeights(found.among(args, ()))
        with torch.no_grad():
            for i in written:
                args[i].add_(1)
        assert weights.rewritten(args) == {*written}
        assert found.vary(weights.rewritten(args), args) == (written == (1,))
        assert sorted(found.among(args, ())) == left


def test_where_that_cannot_be_told_buffers_are_inputs():
    state, weight = torch.zeros(4), nn.Parameter(torch.ones(4))

    def needs_values(x, state, weight):
        return state * weight if x.sum().item() > 0 else state

    assert constants(needs_values, torch.ones(4), state, weight, owned=(1,)) == [2]


def test_buffers_of_another_object_are_constants_and_those_that_are_replaced_are_not():
    """TorchDynamo marks the buffers of the object that it has traced, and no others."""
    layers = [nn.BatchNorm1d(4) for _ in range(2)]
    found, known = Constants(lambda *args: args[2] + args[3], ()), []
    for layer in layers:
        torch._dynamo.mark_static_address(layers[0].running_mean)
        torch._dynamo.mark_static_address(layers[0].running_var)
        args = of(layer)
        assert sorted(found.among(args, known)) == [0, 1, 2, 3]
        known.append(GraphWeights(found.among(args, known)))
    layers[0].running_mean = torch.ones(4)
    assert sorted(found.among(of(layers[0]), known)) == [0, 1, 3]


def test_statistics_that_hold_nan_have_not_changed(clock):
    layer = nn.BatchNorm1d(4)
    layer.running_mean[1] = float("nan")
    weights = watched(layer)
    clock[0] += 1000
    assert weights.are(of(layer))
    layer.num_batches_tracked.add_(1)
    assert weights.are(of(layer))
    layer.running_mean.data[2] = 1.0
    clock[0] += 1000
    assert not weights.are(of(layer))


@pytest.mark.parametrize(
    ("function", "positions"),
    [
        (lambda x, mean, var: F.batch_norm(x, mean, var, training=True), [1, 2]),
        (lambda x, mean, var: F.batch_norm(x + 1, mean, var, None, None, True), [1, 2]),
        (lambda x, mean, var: torch.batch_norm(x * 2, None, None, mean, var, True, 0.1, 1e-5, False), [1, 2]),
        (lambda x, mean, var: F.batch_norm(x, mean, var), []),
        (lambda x, mean, var: F.relu(x) + mean, []),
    ],
)
def test_what_batch_norm_writes_in_training_mode(function, positions):
    found = silently_written(traced(function))
    assert [i for i in found if i] == positions


def traced(function):
    """The graph of TorchDynamo."""
    seen = []

    def backend(graph, _):
        seen.append(graph.graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.randn(3, 4), torch.zeros(4), torch.ones(4))
    return seen[0]
