"""The weights of a graph: which writes are noticed, and how."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tsopt.runtime.calling import graph_weights
from tsopt.runtime.calling.graph_weights import GraphWeights, silently_written


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


def test_what_the_graph_writes_itself_does_not_count(clock):
    layer = nn.BatchNorm1d(4)
    weights = watched(layer)
    weights.leave_out(layer.buffers())
    layer.running_mean.add_(1)
    clock[0] += 1000
    assert weights.are(of(layer))


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
