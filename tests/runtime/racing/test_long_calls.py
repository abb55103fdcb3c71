"""Races of models whose calls take long: what is judged before the rounds, what after them, and what is not called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.runtime.racing.helpers import Behaviour, assert_goes_on, fast_timings, row
from tsopt.compiler.calls.example import Example
from tsopt.compiler.graph.program import Numerics
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.judge import Judge
from tsopt.runtime.racing import choice
from tsopt.runtime.racing import race as race_module
from tsopt.runtime.racing.outcomes import NOT_BIT_EQUAL
from tsopt.runtime.racing.row import Row
from tsopt.runtime.racing.speedup import Speedup, Timing


@pytest.fixture
def long_calls(monkeypatch):
    monkeypatch.setattr(eager_answers, "LONG_CALL", 0.0)


def wrong_if_large(number, inputs, right):
    return [value + 1 for value in right] if inputs[0].abs().max() > 50 else right


@pytest.mark.parametrize("is_long", [True, False])
def test_the_other_input_sets_are_for_the_winner(run_race, monkeypatch, request, is_long):
    if is_long:
        request.getfixturevalue("long_calls")
    monkeypatch.setattr(Behaviour, "run", staticmethod(wrong_if_large))
    fast_timings(monkeypatch)
    found = run_race()
    assert row(found).status == "wrong"
    assert row(found).reason.startswith("after timing: ") == is_long
    assert "on the large input" in row(found).reason
    assert (row(found).timing is not None) == is_long
    assert_goes_on(found)


@pytest.mark.usefixtures("long_calls")
def test_the_report_says_what_each_was_judged_on(run_race, monkeypatch):
    fast_timings(monkeypatch)
    found = run_race()
    assert found.winner == "faulty"
    assert {"example", "drawn-1", "large", "zeros"} <= set(found.row.accuracy.inputs)
    assert row(found, "eager + passes").accuracy.inputs == ("example",)


@pytest.mark.usefixtures("long_calls")
@pytest.mark.parametrize("differs", [False, True])
def test_all_bits_are_compared_of_one_that_should_have_them(run_race, monkeypatch, differs):
    """Before the rounds, only those on the example are."""

    def off_by_little(number, inputs, right):
        is_large = inputs[0].abs().max() > 50
        return [value * (1 + 1e-6) for value in right] if is_large and differs else right

    monkeypatch.setattr(Behaviour, "run", staticmethod(off_by_little))
    monkeypatch.setattr(choice, "is_exact", lambda program, candidate: True)
    fast_timings(monkeypatch)
    found = run_race()
    assert found.winner == "faulty"
    assert (NOT_BIT_EQUAL in found.row.notes) == differs


@pytest.mark.usefixtures("long_calls")
def test_one_that_is_wrong_on_the_example_is_not_timed(run_race, monkeypatch):
    monkeypatch.setattr(Behaviour, "run", lambda number, inputs, right: [value + 1 for value in right])
    found = run_race()
    assert (row(found).status, row(found).timing) == ("wrong", None)
    assert "on the example input" in row(found).reason


@pytest.mark.usefixtures("long_calls")
def test_the_winner_is_judged_on_inputs_that_the_race_did_not_use(run_race, monkeypatch):
    seen: list[list[float]] = []
    rounds: list[int] = []

    def run(number, inputs, right):
        seen.append(inputs[0].reshape(-1).tolist())
        return right

    monkeypatch.setattr(Behaviour, "run", run)
    fast_timings(monkeypatch)
    real = race_module.measure

    def measured(*args, **options):
        found = real(*args, **options)
        rounds.append(len(seen))
        return found

    monkeypatch.setattr(race_module, "measure", measured)
    run_race()
    before, after = seen[: rounds[0]], seen[rounds[0] :]
    assert sum(values not in before for values in after) > 3


@pytest.mark.parametrize(
    ("is_long", "threads", "on_gpu", "asked"),
    [(True, None, False, 0), (True, 1, False, 1), (True, None, True, 1), (False, None, False, 1)],
)
def test_the_time_of_a_long_call_is_known_from_the_answers(
    run_race, monkeypatch, request, torch_threads, is_long, threads, on_gpu, asked
):
    torch_threads(1)
    if is_long:
        request.getfixturevalue("long_calls")
    calls = []

    def seconds_of(*_):
        calls.append(1)
        return 1e-3

    monkeypatch.setattr(race_module, "seconds_of", seconds_of)
    monkeypatch.setattr(race_module, "is_on_gpu", lambda example: on_gpu)
    assert run_race(("eager",), threads=threads).rows[0].status == "ok"
    assert len(calls) == asked


class Timed:
    """One that was timed in a process of its own."""

    retired = False

    def __init__(self, log, fails=lambda x: False):
        self.log, self.fails = log, fails

    def __call__(self, x):
        self.log.append(("there", x))
        return x * 2 + self.fails(x)


class Here(Timed):
    backend, notes, state, precision, tolerance = "eager", (), (), "fp32", None

    def __call__(self, x):
        self.log.append(("here", x))
        return x * 2


GIVEN = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def chosen(monkeypatch, takes_long, fails=lambda x: False):
    """The winner, and who was called on what."""
    log: list[tuple[str, torch.Tensor]] = []
    timed, candidate = Timed(log, fails), Candidate("eager")
    maker = SimpleNamespace(
        settings=SimpleNamespace(candidates=[candidate]),
        files={},
        reopens=lambda *_: True,
        make_room=lambda others: None,
        here=lambda *_: Here(log),
        program=lambda candidate: SimpleNamespace(numerics=Numerics.ROUNDING),
    )
    monkeypatch.setattr(choice, "Isolated", Timed)
    rows = [
        Row("eager", timing=Timing((2.0,) * 7)),
        Row("new", timing=Timing((1.0,) * 7), speedup=Speedup(2.0, 1.9, 2.1), key=candidate.key),
    ]
    asked = []

    def fresh(few):
        asked.append(few)
        return Judge(Oracle(lambda x: x * 2, Example((GIVEN,)), None, few=few))

    quiet = {"streak": lambda executable: "", "progress": lambda text: None}
    found = choice.choose(maker, rows, {candidate.key: timed}, fresh, **quiet, takes_long=takes_long)
    assert asked == [not takes_long]
    return found, [(who, torch.equal(x, GIVEN)) for who, x in log]


def test_what_was_timed_is_called_in_its_own_process_on_all_that_is_new_before_it_is_called_here(monkeypatch):
    found, log = chosen(monkeypatch, takes_long=True)
    assert found.executable is not None
    there = [is_example for who, is_example in log if who == "there"]
    here = [is_example for who, is_example in log if who == "here"]
    assert log == [("there", item) for item in there] + [("here", item) for item in here]
    assert not any(there), "it has been right on the example before"
    assert here.count(False) >= len(there) > 2
    assert any(here)


def test_of_short_calls_it_is_called_on_the_example_once_more(monkeypatch):
    _, log = chosen(monkeypatch, takes_long=False)
    assert log.count(("there", True)) > 1


@pytest.mark.parametrize("takes_long", [True, False])
def test_what_timing_has_corrupted_does_not_win(monkeypatch, takes_long):
    found, log = chosen(monkeypatch, takes_long, fails=lambda x: not torch.equal(x, GIVEN))
    assert found.executable is None
    assert {who for who, _ in log} == {"there"}
