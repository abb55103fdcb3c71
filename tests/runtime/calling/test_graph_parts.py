"""Which graphs between graph breaks are optimized: those that take a share of the time of a call."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from tests.runtime.calling.graphs import Clock, X, call, refuse, taking
from tsopt.runtime.calling import graph_forms, graph_parts, unseen_writes
from tsopt.runtime.calling.graph_parts import FOR_EACH, SPENT, Graph, Purse, as_lines, weigh

pytestmark = pytest.mark.usefixtures("clock")


@pytest.mark.parametrize(
    ("numbers", "text"), [((1,), "part 1: not tried"), ((1, 2), "parts 1, 2: not tried"), ((1, 2, 3), "parts 1 to 3: ")]
)
def test_numbers_in_a_row_are_said_as_a_range(numbers, text):
    graphs = [taking(1.0, []) for _ in numbers]
    for graph in graphs:
        graph.leave("not tried")
    assert as_lines(graphs)[0].startswith(text)


class Compiled:
    """What `optimize` returns: computes with the weight as it was then."""

    executable, report, program = "an engine", SimpleNamespace(is_eager=False), SimpleNamespace(state={})

    def __init__(self, bound) -> None:
        self.weight = bound.weight_1.detach().clone()

    def unwatched(self, on_difference):
        self.on_difference = on_difference

    def __call__(self, x):
        return x * self.weight


def scaled(optimize, **options):
    return Graph(fx.symbolic_trace(lambda x, weight: x * weight), optimize, **options)


def test_what_is_written_while_it_is_optimized_is_used():
    weight, made = nn.Parameter(torch.ones(4)), []

    def optimize(bound, example):
        made.append(Compiled(bound))
        if len(made) == 1:
            weight.add_(1)  # another thread, say
        return made[-1]

    graph = scaled(optimize, changes=3)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(graph(X, weight), 2 * X)
    assert len(made) == 2
    assert graph.fast is made[-1]


def test_a_difference_that_an_audit_finds_outdates_what_was_audited():
    weight, made = nn.Parameter(torch.ones(4)), []
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=3)
    with torch.no_grad():
        graph(X, weight)
        with pytest.warns(UserWarning, match="an audit found a difference"):
            made[0].on_difference("4 is not 5", False)
        graph(X, weight)
        assert graph.fast is made[1]
        with pytest.warns(UserWarning, match="an audit found a difference"):
            made[0].on_difference("4 is not 5", False)  # late, by a thread that still runs it
        graph(X, weight)
    assert len(made) == 2


def test_a_graph_that_is_not_optimized_yet_watches_nothing():
    gc.collect()
    before = len(unseen_writes._watchers)
    graph = scaled(lambda *_: refuse())
    assert len(unseen_writes._watchers) == before
    assert graph.fast is None


def numbered(count):
    return [nn.Parameter(torch.full((4,), float(number))) for number in range(count)]


def test_it_is_optimized_for_the_weights_of_each_object_that_calls_it():
    made, weights = [], numbered(6)
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=3)
    with torch.no_grad():
        for order in (weights, weights, weights[::-1]):
            for weight in order:
                assert torch.equal(graph(X, weight), X * weight)
                assert torch.equal(graph.fast.weight, weight)
        assert graph.every_fast == made
        assert len(made) == 6
        weights[2].add_(10)
        for weight in weights:
            assert torch.equal(graph(X, weight), X * weight)
    assert len(made) == 7
    assert graph.refused == ""


def test_one_object_whose_weights_change_costs_the_others_nothing():
    made, (steady, changing) = [], numbered(2)
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=1)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            for weight in (steady, changing):
                assert torch.equal(graph(X, weight), X * weight)
            changing.add_(1)
        assert graph.fast is None
        graph(X, steady)
        assert graph.fast is made[0]
    assert (len(made), len(said)) == (3, 1)
    assert "is not optimized any more: its weights change between calls" in str(said[0].message)


def test_more_objects_than_it_is_optimized_for_are_served_by_the_graph_itself(monkeypatch):
    monkeypatch.setattr(graph_parts, "MOST_OBJECTS", 2)
    made, weights = [], numbered(4)
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=3)
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for weight in (*weights, *weights):
            assert torch.equal(graph(X, weight), X * weight)
    assert (len(made), len(said)) == (2, 1)
    assert "more than 2 objects call it" in str(said[0].message)


def test_what_was_made_for_weights_that_are_gone_is_gone():
    made = []
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=3)
    (weight,) = numbered(1)
    with torch.no_grad():
        graph(X, weight)
    there = weakref.ref(made.pop())
    del weight
    gc.collect()
    assert there() is None
    assert graph.fast is None


@pytest.mark.parametrize(("calls", "count"), [(1, graph_parts.LOSSES + 1), (5, 12)])
def test_weights_that_are_replaced_all_the_time_are_not_optimized_for_and_those_of_one_model_after_another_are(
    monkeypatch, calls, count
):
    monkeypatch.setattr(graph_forms, "PAYS", 5)
    graph = scaled(lambda bound, _: made.append(1) or Compiled(bound), changes=3)
    made = []
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(12):
            (weight,) = numbered(1)
            for _ in range(calls):
                assert torch.equal(graph(X, weight), X * weight)
    assert len(made) == count
    assert [" its weights are replaced between calls." in str(item.message) for item in said] == [True] * (count != 12)


def test_where_eager_wins_for_one_object_it_is_not_tried_for_others():
    made, weights = [], numbered(3)

    class Eager(Compiled):
        executable, report = None, SimpleNamespace(is_eager=True)

    graph = scaled(lambda bound, _: made.append(Eager(bound)) or made[-1], changes=3)
    with torch.no_grad():
        for weight in (*weights, *weights):
            assert torch.equal(graph(X, weight), X * weight)
            weight.add_(1)
    assert len(made) == 1


def test_a_part_takes_the_time_of_one_object_and_all_are_optimized():
    optimized = []
    graph, small = taking(0.1, optimized), taking(0.01, optimized)
    shared = scaled(lambda bound, _: Compiled(bound))
    as_it_is, weights = shared._as_it_is, numbered(4)

    def run(*args):
        Clock.now += 0.1
        return as_it_is(*args)

    shared._as_it_is = run

    def timed():
        start = Clock.now
        with torch.no_grad():
            for weight in weights:
                shared(X, weight)
        return Clock.now - start + call([graph, small], 0.09)

    weigh([graph, small, shared], timed)
    assert shared.share == pytest.approx(graph.share)
    timed()
    assert (len(shared.every_fast), optimized) == (4, [0.1])


def test_what_is_released_runs_unchanged_and_holds_nothing():
    made = []
    graph = scaled(lambda bound, _: made.append(Compiled(bound)) or made[-1], changes=3)
    weights = numbered(2)
    with torch.no_grad():
        graph(X, weights[0])
        there = weakref.ref(made.pop())
        graph.release()
        gc.collect()
        assert there() is None
        for weight in weights:
            assert torch.equal(graph(X, weight), X * weight)
    assert (made, graph.every_fast) == ([], [])


class Told(Compiled):
    report = SimpleNamespace(is_eager=False, nodes=(1, 1), winner="onednn")


def taking_its_time(seconds, **options):
    def optimize(bound, _):
        Clock.now += seconds
        return Told(bound)

    return scaled(optimize, **options)


def test_all_objects_together_take_the_time_of_all_parts():
    weights, graph, other = numbered(6), taking_its_time(FOR_EACH), taking_its_time(FOR_EACH)
    graph.purse = other.purse = Purse(2.5 * FOR_EACH)
    graph.share, budgets = 1.0, []
    with torch.no_grad():
        for weight in (*weights, *weights):
            budgets.append(graph.budget)
            assert torch.equal(graph(X, weight), X * weight)
    assert budgets[:3] == [2.5 * FOR_EACH, 1.5 * FOR_EACH, FOR_EACH]
    assert (len(graph.every_fast), graph.refused) == (2, SPENT)
    assert as_lines([graph]) == ["part 1: 100% of a call: 1 op nodes, onednn wins", f"part 1: {SPENT}"]
    with torch.no_grad():
        assert all(torch.equal(other(X, weight), X * weight) for weight in weights)
    assert len(other.every_fast) == 1, "each part is optimized once"


def test_objects_of_graphs_that_turn_up_later_count_as_such():
    graph, weights = taking_its_time(1.0), numbered(4)
    graph.has_room = lambda: graph.tries <= 2
    with torch.no_grad():
        assert all(torch.equal(graph(X, weight), X * weight) for weight in weights)
    assert len(graph.every_fast) == 2


def test_weights_that_are_loaded_after_a_first_call_are_optimized_for():
    graph, weights = scaled(lambda bound, _: Compiled(bound), changes=3), numbered(6)
    with torch.no_grad():
        for weight in weights:
            graph(X, weight)
            weight.add_(1)
        assert all(torch.equal(graph(X, weight), X * weight) for weight in weights)
    assert (len(graph.every_fast), graph.refused) == (6, "")


@pytest.mark.parametrize(("calls", "count"), [(1, 15), (5, 24)])
def test_after_the_first_change_of_each_object_those_in_vain_are_as_many_as_those_of_one(monkeypatch, calls, count):
    monkeypatch.setattr(graph_parts, "PAYS", 5)
    made, weights = [], numbered(6)
    graph = scaled(lambda bound, _: made.append(1) or Compiled(bound), changes=3)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(8):
            for weight in weights * calls:
                assert torch.equal(graph(X, weight), X * weight)
            for weight in weights:
                weight.add_(1)
    assert len(made) == count


class AsItIs(Compiled):
    def __init__(self, bound):
        self.bound = bound

    def __call__(self, *values):
        return self.bound(*values)


def test_a_buffer_that_turns_out_to_be_state_is_no_further_object():
    graph, buffer = scaled(lambda bound, _: AsItIs(bound)), torch.ones(4)
    buffer._dynamo_static_input_type = "unguarded"
    graph.purse = Purse(0.0)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(graph(X, buffer), X * buffer)
            buffer.add_(1)
    assert (len(graph.every_fast), graph.refused) == (1, "")
