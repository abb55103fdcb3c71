"""Many calls in a row on fresh inputs: what is wrong once in a hundred calls does not win."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking import repeated_calls
from tsopt.runtime.checking.repeated_calls import drawn, unsteady
from tsopt.runtime.racing import contenders, race
from tsopt.runtime.racing.speedup import Speedup

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def model(x):
    return x * 2 + 1


@pytest.fixture
def executable():
    return tsopt.compile(tsopt.capture(model, X), "eager")


def faulty(executable, wrong):
    """The same, and wrong where that is said of a call by its number and inputs."""
    right, calls = executable._run, []

    def run(inputs):
        calls.append(1)
        found = right(inputs)
        return [found[0] + 1] if wrong(len(calls), inputs[0]) else found

    executable._runs(run)
    return executable


def test_a_right_candidate_is_called_so_often_and_passes(executable):
    calls = []
    assert unsteady(faulty(executable, lambda number, x: calls.append(number)), model, Example((X,)), seconds=60) == ""
    assert len(calls) == repeated_calls.CALLS


@pytest.mark.parametrize("every", [3, 100, 250])
def test_what_is_wrong_every_so_many_calls_is_found(executable, every):
    found = unsteady(faulty(executable, lambda number, x: number % every == 0), model, Example((X,)), seconds=60)
    assert found.startswith(f"repeated call {every} on fresh inputs: output: ")


def test_what_is_wrong_for_some_inputs_only_is_found(executable):
    found = unsteady(
        faulty(executable, lambda number, x: bool(x[0, 0] > x.max() - 0.2)), model, Example((X,)), seconds=60
    )
    assert "on fresh inputs" in found


def test_of_what_is_wrong_once_in_a_hundred_calls_at_random_one_in_twenty_is_left():
    draw = random.Random(0)
    left = sum(all(draw.random() >= 0.01 for _ in range(repeated_calls.CALLS)) for _ in range(2000)) / 2000
    assert 0.03 < left < 0.07


def test_rounding_and_what_eager_refuses_are_not_held_against_it(executable):
    scaled = executable._run
    executable._runs(lambda inputs: [scaled(inputs)[0] * (1 + 1e-3)])
    assert unsteady(executable, model, Example((X,)), seconds=60, calls=20) == ""

    def refuses(x):
        raise ValueError("not these")

    assert unsteady(executable, refuses, Example((X,)), seconds=60, calls=20) == ""


def test_it_ends_when_its_time_is_over(executable):
    ticks = iter(range(100))
    calls = []
    faulty(executable, lambda number, x: calls.append(number))
    unsteady(executable, model, Example((X,)), seconds=3, clock=lambda: float(next(ticks)))
    assert len(calls) == 4


def test_drawn_values_are_those_of_the_example_in_its_layout():
    generator = torch.Generator().manual_seed(0)
    index, turned, one = drawn([torch.tensor([2, 5, 7]), X.t(), torch.tensor(3.0)], generator)
    assert set(index.tolist()) <= {2, 5, 7}
    assert turned.stride() == X.t().stride()
    assert one == 3.0


def test_in_a_race_such_a_candidate_does_not_win(monkeypatch, executable):
    monkeypatch.setattr(race, "speedup", lambda *_: Speedup(2.0, 1.9, 2.1))
    timed, later = [], itertools.count()

    def compile(program, backend, **options):
        # Right until it was timed, and verified once more.
        made = faulty(tsopt.compile(program, "eager"), lambda number, x: timed and next(later) > 60 and number % 7 == 0)
        made._runs(made._run)
        return made

    def measured(calls, inputs, **_):
        timed.append(1)
        return dict.fromkeys(calls, TIMING)

    monkeypatch.setattr(contenders, "compile", compile)
    monkeypatch.setattr(race, "STREAK", 1e6)
    monkeypatch.setattr(race, "measure", measured)
    fast = tsopt.optimize(model, X, backends=("eager",), seconds=0.02, isolate=False, cache=False)
    assert fast.executable is None
    assert "on fresh inputs" in fast.report.row("eager + passes").reason


TIMING = tsopt.runtime.racing.speedup.Timing((1.0, 1.1))
