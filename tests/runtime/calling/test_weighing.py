"""Which share of the time of a call each graph takes, and which graphs take too little of it."""

from __future__ import annotations

import pytest

from tests.runtime.calling.graphs import call, refuse, taking
from tsopt.runtime.calling import graph_parts
from tsopt.runtime.calling.graph_parts import FOR_EACH, as_lines, weigh

pytestmark = pytest.mark.usefixtures("clock")


def test_graphs_that_take_next_to_none_of_the_time_are_left_as_they_are():
    optimized = []
    graphs = [taking(seconds, optimized) for seconds in (0.5, 0.001, 0.2, 0.002)]
    never = taking(0.0, optimized)
    assert weigh([*graphs, never], lambda: call(graphs, 0.297)) == pytest.approx(1.0)
    assert optimized == [], "calls that weigh run the graphs as they are"
    call([*graphs, never])
    assert optimized == [0.5, 0.2, 0.0]
    assert as_lines(graphs) == ["parts 1, 3: not here", "parts 2, 4: less than 2% of the time"]
    assert graphs[0].budget == graph_parts.FOR_WHOLE * 0.5
    assert graphs[2].budget == max(FOR_EACH, graph_parts.FOR_WHOLE * 0.2)
    assert never.budget is None


def test_when_the_largest_take_most_of_the_time_the_others_are_left_as_they_are():
    optimized = []
    graphs = [taking(seconds, optimized) for seconds in (0.03, 0.5, 0.03, 0.3, 0.04)]
    weigh(graphs, lambda: call(graphs, 0.1))
    call(graphs)
    assert optimized == [0.5, 0.3]
    assert as_lines(graphs)[0] == "parts 1, 3, 5: larger parts take 80% of the time of all parts"


def test_of_many_parts_of_one_size_most_are_optimized():
    optimized = []
    graphs = [taking(0.1, optimized) for _ in range(20)]
    weigh(graphs, lambda: call(graphs))
    call(graphs)
    assert len(optimized) == 16


@pytest.mark.parametrize(("seconds", "tried"), [(0.2, [0.2]), (0.05, [])])
def test_one_that_turns_up_later_is_weighed_by_its_first_call(seconds, tried):
    optimized = []
    late = taking(seconds, optimized)
    late.late = 1.0
    call([late])
    assert optimized == []
    assert "traced later" in late.refused
    call([late])
    call([late])
    assert optimized == tried


def test_of_those_that_turn_up_later_only_some_are_optimized():
    optimized = []
    late = taking(0.5, optimized)
    late.late, late.has_room = 1.0, lambda: False
    call([late])
    call([late])
    assert optimized == []
    assert late.refused == f"traced after {graph_parts.MOST_LATER} others for other sizes"


def test_of_calls_that_take_long_the_traced_one_is_enough():
    optimized = []
    graphs = [taking(seconds, optimized) for seconds in (1.5, 0.01, 0.5, 30.0)]
    never = taking(0.0, optimized)
    for graph in graphs:
        graph.is_timed = True
    call(graphs, 40.0)
    assert weigh([*graphs, never], refuse, 2.0) == 2.0
    assert [graph.share for graph in graphs] == pytest.approx([0.75, 0.005, 0.25, 1.0]), "no more than the call"
    call(graphs)
    assert optimized == [1.5, 30.0]
    assert never.share is None
