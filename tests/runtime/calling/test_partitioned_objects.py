"""Objects of one class in parts: each has its own weights, and what is gone is freed."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from torch import nn

from tests.runtime.calling.parts import Block, X, due, optimized
from tsopt.runtime.calling import graph_parts, partitioned, parts_in_turn
from tsopt.runtime.calling.partitioned import PARTS
from tsopt.runtime.racing.speedup import Timing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
REGIONS = pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters, reason="eight models share what dynamo has"
)


@pytest.fixture(autouse=True)
def _all_matter(monkeypatch):
    """No part is left as it is because it takes little of the time, or others took much."""
    monkeypatch.setattr(parts_in_turn, "FOR_ALL", float("inf"))
    monkeypatch.setattr(graph_parts, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(graph_parts, "COVERED", 2.0)


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_equal_blocks_with_breaks_inside_are_all_optimized(made):
    model = nn.Sequential(*[Block() for _ in range(3)]).eval()
    fast = optimized(model, frontend="parts")
    torch.testing.assert_close(fast(X), model(X).detach())
    assert sorted(len(graph.every_fast) for graph in made if graph.share) == [3, 3]


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_when_the_time_for_all_is_spent_each_part_has_been_optimized_for_one_block(made, monkeypatch):
    monkeypatch.setattr(parts_in_turn, "FOR_ALL", 0.0)
    model = nn.Sequential(*[Block() for _ in range(3)]).eval()
    fast = optimized(model, frontend="parts")
    torch.testing.assert_close(fast(X), model(X).detach())
    assert sorted(len(graph.every_fast) for graph in made if graph.share) == [1, 1]
    assert "parts 1, 2: left as it is for further objects: the time for all parts is spent" in fast.report.text


def counted(model):
    """Calls a model as compiled by the user, and says how many graphs that made."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(X)
    return len(graphs)


@REGIONS
@pytest.mark.slow
@pytest.mark.usefixtures("parts_win", "always_faster")
def test_one_model_of_a_class_after_another_is_optimized_and_leaves_dynamo_to_the_user():
    for _ in range(10):
        fast = optimized(Block().eval(), frontend="parts", seconds=0.01)
        assert "2 of 2 parts optimized" in fast.report.frontend
    assert counted(Block().eval()) == 2


@REGIONS
@pytest.mark.usefixtures("parts_win", "always_faster", "single_threaded")
def test_models_that_are_gone_leave_room_for_others_of_their_class():
    with torch._dynamo.config.patch(accumulated_recompile_limit=3):
        for _ in range(5):
            fast = optimized(Block().eval(), frontend="parts", seconds=0.01)
            assert "2 of 2 parts optimized" in fast.report.frontend
            del fast
            gc.collect()
        assert counted(Block().eval()) == 2


@REGIONS
@pytest.mark.usefixtures("parts_win", "always_faster", "single_threaded")
def test_what_others_of_its_class_have_is_kept_when_a_model_is_gone(made):
    mine, users = Block().eval(), Block().eval()
    fast, compiled = optimized(mine, frontend="parts", seconds=0.01), torch.compile(users, backend="eager")
    with torch.no_grad():
        compiled(X)
    optimized(Block().eval(), frontend="parts", seconds=0.01)
    gc.collect()
    other = optimized(Block().eval(), frontend="parts", seconds=0.01)
    count = len(made)
    with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
        torch.testing.assert_close(compiled(X), users(X))
        torch.testing.assert_close(fast(X), mine(X))
        other(X)
    assert len(made) == count


@pytest.mark.parametrize("wins", [True, False])
def test_a_model_that_is_gone_is_not_kept_by_its_parts(made, monkeypatch, request, wins):
    if wins:
        request.getfixturevalue("always_faster")

    def measure(calls, inputs, **_):
        return {name: Timing((1.0, 1.01) * 4 if wins == (name == PARTS) else (9.0, 9.01) * 4, 5) for name in calls}

    monkeypatch.setattr(partitioned, "measure", measure)
    model = Block().eval()
    fast = optimized(model, frontend="parts")
    forms = [weakref.ref(form) for graph in made for form in graph.every_fast]
    assert len(forms) == (2 if wins else 0), "where eager wins, nothing is kept from the start"
    fast(X)
    there = [*forms, *map(weakref.ref, model.parameters())]
    del model, fast
    gc.collect()
    assert [item() for item in there] == [None] * len(there)


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_after_an_audit_that_finds_a_difference_nothing_is_kept(made):
    model = Block().eval()
    fast = due(optimized(model, frontend="parts"))
    model.b.weight.detach().numpy()[:] *= 2
    with pytest.warns(UserWarning, match="runs in eager mode from now on"):
        torch.testing.assert_close(fast(X), model(X).detach())
    assert [graph.every_fast for graph in made] == [[], []]


class Counts(nn.Module):
    """Writes a buffer on one side of a break, and reads it on the other."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count.add_(1)
        hidden = self.a(x)
        torch._dynamo.graph_break()
        return self.b(hidden) * self.count


@pytest.mark.usefixtures("parts_win", "always_faster")
def test_a_buffer_that_one_part_writes_is_an_input_of_the_others(made):
    model = Counts().eval()
    fast = optimized(model, frontend="parts")
    for graph in made:
        graph._as_it_is = None  # never called again
    for count in (1, 2, 3):
        torch.testing.assert_close(fast(X), model.b(model.a(X)).detach() * count)


@pytest.mark.usefixtures("always_faster")
def test_where_dynamo_compiles_nothing_the_report_says_so():
    with torch._dynamo.config.patch(accumulated_recompile_limit=0):
        fast = optimized(Block().eval(), frontend="parts")
    assert "TorchDynamo compiles none of its code" in fast.report.text
