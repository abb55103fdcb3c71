"""The order in which the parts of a model are optimized, and when the others are left as they are."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
from torch import nn

from tests.runtime.calling.parts import Block, X, optimized
from tsopt.runtime.calling import graph_parts, partitioned
from tsopt.runtime.calling.partitioned import PARTS
from tsopt.runtime.calling.parts_in_turn import Lease
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import FIRST
from tsopt.runtime.checking.verdict import Verdict

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def _all_matter(monkeypatch):
    """No part is left as it is because it takes little of the time; the second one of two is the largest."""
    real = graph_parts.weigh

    def weigh(graphs, *how):
        seconds = real(graphs, *how)
        for number, graph in enumerate(graphs, 1):
            graph.share = number / 10
        return seconds

    monkeypatch.setattr("tsopt.runtime.calling.parts_in_turn.weigh", weigh)
    monkeypatch.setattr(graph_parts, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(graph_parts, "COVERED", 2.0)


@pytest.fixture
def judged(monkeypatch):
    """What a model is found to be each time that it is judged; which parts have been optimized by then is returned."""
    real, seen = partitioned.Oracle.judge, []

    def says(*found):
        answers = list(found)

        def judge(self, candidate, **options):
            if self.eager.program is None and answers:
                seen.append(options.get("part") == FIRST)
                return Verdict(answers.pop(0), "element", 0.0, ("example",), reason="off")
            return real(self, candidate, **options)

        monkeypatch.setattr(partitioned.Oracle, "judge", judge)
        return seen

    return says


def titles(told):
    """The parts, in the order in which they were optimized, and the verdicts between them."""
    steps = [text for text in told if text.startswith("check part") or (text.startswith("part ") and ":" not in text)]
    return [text.removesuffix(" of 2") for text in steps]


@pytest.mark.usefixtures("always_faster")
def test_a_model_that_is_wrong_with_its_largest_part_keeps_the_others_as_they_are(judged, made):
    seen, told = judged(False), []
    fast = optimized(Block().eval(), frontend="parts", progress=told.append)
    assert titles(told) == ["part 2", f"check {PARTS}"]
    assert seen == [True]
    assert (fast.backend, fast.report.row(PARTS).status) == ("eager", "wrong")
    assert "part 1: not tried: the model is wrong already with part 2 optimized" in fast.report.text
    assert not any(text.startswith(("first calls", "time: ")) for text in told), "nobody asks how long it takes"
    fast(X)
    assert [graph.tries for graph in made] == [0, 1]


@pytest.mark.usefixtures("always_faster", "parts_win")
def test_one_that_is_right_with_its_largest_part_is_judged_again_with_all(judged):
    seen, told = judged(True, True), []
    fast = optimized(Block().eval(), frontend="parts", progress=told.append)
    assert titles(told) == ["part 2", f"check {PARTS}", "part 1", f"check {PARTS}"]
    assert seen == [True, False], "at last on all input sets"
    assert "2 of 2 parts optimized" in fast.report.frontend
    model = Block().eval()
    model.load_state_dict(fast.model.state_dict())
    torch.testing.assert_close(fast(X), model(X).detach())


def test_a_part_that_stays_as_it_is_says_nothing_about_the_model(judged):
    seen, told = judged(False), []
    optimized(Block().eval(), frontend="parts", progress=told.append, backends=("eager",))
    assert titles(told) == ["part 2", "part 1", f"check {PARTS}"]
    assert seen == [False]


@pytest.mark.usefixtures("always_faster")
def test_a_model_that_is_wrong_at_last_is_not_timed(judged):
    judged(True, False)
    told = []
    fast = optimized(Block().eval(), frontend="parts", progress=told.append)
    assert fast.report.row(PARTS).status == "wrong"
    assert not any(text.startswith(("first calls", "time: ")) for text in told)


def test_graphs_that_turn_up_while_others_have_their_turn_wait_as_well():
    tried = []

    def optimize(called, inputs, budget, progress):
        tried.append(called)
        raise graph_parts.TsoptError("not here")

    lease = Lease(optimize, lambda text: None, lambda: None)
    parts = lease.parts
    made = [parts.backend(torch.fx.symbolic_trace(nn.Linear(8, 8)), ()) for _ in range(2)]
    parts.call_seconds = 1.0
    for graph, share in zip(made, (0.2, 0.6), strict=True):
        graph.is_timed, graph.share = False, share
    turns = parts.in_turn()
    with torch.no_grad():
        assert next(turns) is False
        late = parts.backend(torch.fx.symbolic_trace(nn.ReLU()), ())
        late.late, late.share = None, 0.5
        for graph in (*made, late):
            graph(X)
        assert len(tried) == 1
        assert next(turns) is True
        for graph in (*made, late):
            graph(X)
    assert len(tried) == 3


class Chaotic(nn.Module):
    """Two graphs; the Python code between them takes digits that rounding decides, where it is asked to."""

    def __init__(self, magnifies=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.magnifies = nn.Linear(64, 64), nn.Linear(64, 8), magnifies

    def forward(self, x):
        hidden = self.a(x)
        torch._dynamo.graph_break()
        if self.magnifies:
            hidden = torch.frac(hidden * self.magnifies)
        return self.b(hidden)


WIDE = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def long_calls(monkeypatch):
    monkeypatch.setattr(eager_answers, "LONG_CALL", 0.0)


@pytest.fixture
def first_is_largest(monkeypatch):
    def weigh(graphs, *how):
        for number, graph in enumerate(graphs, 1):
            graph.is_timed, graph.share = False, 1 / number
        return 60.0

    monkeypatch.setattr("tsopt.runtime.calling.parts_in_turn.weigh", weigh)


FLOAT64 = "check part 1 in float64"


@pytest.mark.usefixtures("first_is_largest", "long_calls")
def test_where_rounding_decides_and_calls_take_long_no_part_is_optimized(made):
    told = []
    model = Chaotic(1e7).eval()
    fast = optimized(model, WIDE, frontend="parts", progress=told.append)
    assert told == ["eager", FLOAT64]
    assert [graph.tries for graph in made] == [0, 0]
    found = fast.report.row(PARTS)
    assert (fast.backend, found.status) == ("eager", "wrong")
    assert found.reason.startswith("rounding decides its results: they are wrong with part 1 in float64; output on the")
    assert "parts 1, 2: not tried: rounding decides its results" in fast.report.text
    assert torch.equal(fast(WIDE), model(WIDE))


@pytest.mark.usefixtures("first_is_largest", "long_calls", "always_faster", "parts_win")
def test_where_rounding_does_not_decide_all_go_on_as_they_were(made):
    told = []
    model = Chaotic().eval()
    fast = optimized(model, WIDE, frontend="parts", progress=told.append)
    assert titles(told) == [FLOAT64, "part 1", f"check {PARTS}", "part 2", f"check {PARTS}"]
    assert [graph.tries for graph in made] == [1, 1]
    assert fast.backend == "parts"
    torch.testing.assert_close(fast(WIDE), model(WIDE).detach())
    assert all(isinstance(graph.forward, MethodType) for graph in made), "as they were made"


@pytest.mark.usefixtures("first_is_largest")
def test_where_calls_are_short_each_part_is_tried():
    told = []
    optimized(Chaotic(1e7).eval(), WIDE, frontend="parts", progress=told.append)
    assert FLOAT64 not in told
    assert "part 1 of 2" in told


@pytest.mark.usefixtures("first_is_largest", "long_calls")
def test_a_model_that_refuses_what_float64_gives_says_nothing():
    class Strict(Chaotic):
        def forward(self, x):
            hidden = self.a(x)
            torch._dynamo.graph_break()
            if not torch.equal(hidden, self.a(x)):
                raise ValueError("not what it was")
            return self.b(hidden)

    told = []
    optimized(Strict().eval(), WIDE, frontend="parts", progress=told.append)
    assert told[: told.index(FLOAT64) + 2][-1].startswith("part ")


@pytest.mark.usefixtures("long_calls")
def test_without_a_part_that_matters_none_is_computed_in_float64(monkeypatch):
    monkeypatch.setattr("tsopt.runtime.calling.parts_in_turn.weigh", lambda graphs, *how: 1.0)
    told = []
    optimized(Chaotic().eval(), WIDE, frontend="parts", progress=told.append)
    assert not any("float64" in text for text in told)
