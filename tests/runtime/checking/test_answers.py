"""What calls write beside what they return, as it is judged on data."""

from __future__ import annotations

import pytest
import torch

import tsopt
from tests.runtime.checking.judged import DATA, MODEL, SIGNATURE, criterion, off_by
from tsopt.runtime.checking import answers
from tsopt.runtime.checking.answers import LEAST, answers_of, outputs_of
from tsopt.runtime.checking.criterion import WIDER, criterion_of

STATE = torch.zeros(4, 3)
ASKED = [(None, None), ("top1", 0.3), (lambda model: 1.0, 0.3), (None, 0.01)]


def into_an_input(called):
    return lambda x: x[:, :3].copy_(called(x)).sum() * 0


def into_state(called):
    return lambda x: STATE.add_(called(x)).sum() * 0


@pytest.mark.parametrize(("metric", "max_drop"), ASKED, ids=["error", "top1", "function", "drop"])
@pytest.mark.parametrize(("writing", "what"), [(into_an_input, "input 0"), (into_state, "the model's state")])
def test_what_a_call_writes_is_judged_as_an_output(writing, what, metric, max_drop):
    found = criterion_of(writing(MODEL), DATA, metric, max_drop, SIGNATURE, (STATE,))
    assert found.judge(writing(off_by(0.01))).ok
    judgement = found.judge(writing(off_by(0.3)))
    assert not judgement.ok
    if max_drop != 0.01:
        assert f"relative error 30.00% ({what}) on 5 inputs, limit 4.40%" in judgement.text
    assert found.tolerance(writing(off_by(0.02))) == pytest.approx(0.02 * WIDER)


def test_only_what_a_call_changes_counts_of_what_it_writes():
    """Such as a cache of keys, of which each step writes one row."""
    cache = torch.full((1000, 4, 3), 50.0)

    def step(called, place=3):
        def run(x):
            cache[place] = called(x)
            return x * 1

        return run

    found = criterion_of(step(MODEL), DATA, None, None, SIGNATURE, (cache,))
    assert found.judge(step(off_by(0.03))).loss == pytest.approx(0.03)
    assert not found.judge(step(off_by(0.05))).ok
    assert not found.judge(step(MODEL, place=4)).ok, "it writes elsewhere"


def test_numbers_of_what_is_written_are_equal():
    count = torch.zeros(3, dtype=torch.long)

    def adding(number):
        return lambda x: (count.add_(number), MODEL(x))[1]

    for metric, drop in (("sqnr", None), ("cosine", 0.5), ("top1", 0.5)):
        found = criterion_of(adding(1), DATA, metric, drop, SIGNATURE, (count,))
        assert found.judge(adding(1)).ok
        assert not found.judge(adding(2)).ok


def test_what_a_call_puts_into_its_objects_is_judged():
    data = [tsopt.example(call.args[0], {}) for call in DATA]

    def filling(called):
        def run(x, cache):
            cache["key"] = called(x)
            return x * 1

        return run

    found = criterion("top1", 0.3, data, filling(MODEL))
    assert found.judge(filling(off_by(0.03))).ok
    judgement = found.judge(filling(off_by(0.05)))
    assert (judgement.ok, judgement.error) == (False, pytest.approx(0.05))


def test_an_output_that_is_state_is_told_as_the_call_has_left_it():
    count = torch.zeros(3)

    def called(x):
        return count.add_(1)

    for _ in range(2):
        (found,) = outputs_of(called, DATA[0], [count])
        assert found.tolist() == [1.0, 1.0, 1.0]
    assert count.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("seconds", "answered"), [(0.0, LEAST), (3600.0, 40)])
def test_calls_that_take_long_are_answered_in_part(monkeypatch, seconds, answered):
    monkeypatch.setattr(answers, "SECONDS", seconds)
    assert len(answers_of(MODEL, DATA * 8, ()).calls) == answered
    assert len(answers_of(MODEL, DATA, ()).calls) == len(DATA)


def test_a_criterion_for_other_inputs_asks_the_same():
    found = criterion("top1", 0.3)
    seen = []

    def counted(x):
        seen.append(x)
        return MODEL(x)

    assert found.on(counted, DATA[:2]).judge(MODEL).text.startswith("top-1 agreement with eager 1 on 2 inputs")
    assert not seen, "these answers are known"
    others = [tsopt.example(call.args[0] + 1) for call in DATA[:3]]
    assert found.on(counted, others).judge(MODEL).text.startswith("top-1 agreement with eager 1 on 3 inputs")
    assert len(seen) == 3
    function = criterion(lambda model: 1.0, 0.3)
    assert function.on(MODEL, others) is function
