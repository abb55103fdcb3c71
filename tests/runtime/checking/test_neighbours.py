"""Errors that vary from draw to draw: what counts as eager's, and what is still wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph.values import Values
from tsopt.runtime.checking import neighbours as near
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.compare import NOISE
from tsopt.runtime.checking.neighbours import DRAWS, Answers, neighbours


def test_each_element_moves_by_one_unit_in_its_last_place():
    x = torch.tensor([1.0, -3.0, 0.0, torch.inf])
    found = list(neighbours([x, torch.tensor([7])], seed=0))
    assert len(found) == DRAWS
    for moved, whole in found:
        away = (moved[:2] - x[:2]).abs() / x[:2].abs()
        assert bool(((away > 0) & (away <= 2 * torch.finfo(torch.float32).eps)).all())
        assert torch.equal(moved[2:], x[2:])
        assert torch.equal(whole, torch.tensor([7]))
    assert len({tuple(moved[:2].tolist()) for moved, _ in found}) > 1


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_one_byte_move_too(dtype):
    x = torch.tensor([1.0, -3.0]).to(dtype)
    for (moved,) in neighbours([x], seed=0):
        assert moved.dtype == dtype
        away = (moved.float() - x.float()).abs() / x.float().abs()
        assert bool(((away > 0) & (away <= 2 * torch.finfo(dtype).eps)).all())


def test_whole_numbers_have_no_neighbours():
    assert list(neighbours([torch.tensor([1, 2])], seed=0)) == []


STEEP = 1e4


class Steep(nn.Module):
    """It amplifies the rounding error of a product, and refuses inputs other than the one it is told."""

    def __init__(self, only=None):
        super().__init__()
        self.only = only

    def forward(self, x):
        wave = torch.sin(x * STEEP)
        if self.only is None:
            return wave
        return wave + torch.zeros(1)[(x != self.only).long()]  # an index out of range


def in_another_order(x):
    return torch.sin(x * STEEP**0.5 * STEEP**0.5)


def lucky():
    """An input for which the model rounds down little, and the other order much."""
    x = 1 + torch.arange(20000).float() / 20000
    exact = x.double() * STEEP
    mine, other = ((found.double() - exact).abs() for found in (x * STEEP, x * STEEP**0.5 * STEEP**0.5))
    near = torch.finfo(torch.float32).eps * exact
    found = x[(other > 3.5 * mine) & (mine > near / 7) & (torch.cos(exact).abs() > 0.9)]
    return found[:1].reshape(1, 1)


def oracle(model):
    x = lucky()
    return Oracle(model, as_example(x), tsopt.capture(model, x), only="lucky")


def test_another_order_of_a_model_that_amplifies_rounding_is_right():
    verdict = oracle(Steep()).judge(in_another_order)
    assert (verdict.ok, verdict.test) == (True, "float64"), verdict.reason


def test_one_draw_would_not_have_done():
    verdict = oracle(Steep(only=float(lucky()))).judge(in_another_order)
    assert not verdict.ok, "the model refuses all neighbours"
    assert "against float64: RMSE" in verdict.reason


@pytest.mark.parametrize("by", [1e-5, 1e-2])
def test_a_mistake_that_rounding_does_not_explain_is_still_wrong(by):
    assert not oracle(Steep()).judge(lambda x: Steep()(x * (1 + by))).ok


class Waves(nn.Module):
    """The sine of a large number is what rounding makes of it; `floor` has the extremes of a float tried."""

    def forward(self, x):
        return torch.sin(x * 0.7) + (x - x.floor())


class WavesInAnotherOrder(Waves):
    def forward(self, x):
        return torch.sin(x * 0.7**0.5 * 0.7**0.5) + (x - x.floor())


def judged_on_waves(candidate, **options):
    x = torch.randn(2, 8)
    return Oracle(Waves(), as_example(x), tsopt.capture(Waves(), x), **options).judge(candidate)


def test_where_eager_itself_is_noise_on_extremes_another_order_gets_a_note():
    verdict = judged_on_waves(WavesInAnotherOrder())
    assert verdict.ok, verdict.reason
    assert verdict.notes[0].startswith("differs from eager where rounding an input changes the outputs as much: ")
    assert "extreme" in verdict.notes[0]


def test_what_is_further_away_than_noise_is_wrong_on_extremes():
    verdict = judged_on_waves(lambda x: torch.where(x.abs() > 1e9, x, Waves()(x)))
    assert not verdict.ok
    assert "extreme" in verdict.reason


def test_noise_is_no_excuse_where_every_difference_decides():
    assert not judged_on_waves(WavesInAnotherOrder(), strict_specials=True).ok


class Lookup(nn.Module):
    """Attention over a cache: of scores that are a hundred times too large the largest takes all."""

    def forward(self, query, key, value):
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value


def lookup(key_step: float, **precision):
    """The verdict on a candidate that rounds the keys to multiples of a part of the largest."""

    def candidate(query, key, value):
        step = (key.abs().max() * key_step).clamp(min=1e-9)
        return Lookup()(query, (key / step).round() * step, value)

    draw = torch.Generator().manual_seed(6)  # the first two scores of a query are close together
    call = tuple(torch.randn(*shape, generator=draw) / 4 for shape in ((3, 64), (2048, 64), (2048, 4)))
    return Oracle(Lookup(), as_example(call), tsopt.capture(Lookup(), call)).judge(candidate, **precision)


def test_on_too_large_inputs_a_lower_precision_may_differ_as_much_as_its_rounding_moves_eager():
    verdict = lookup(1 / 48, precision="int8")
    assert verdict.ok, verdict.reason
    assert "on the large input: relative error" in verdict.notes[0]


def test_on_too_large_inputs_what_rounding_does_not_explain_is_wrong():
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(8, 8).eval()
    judge = Oracle(model, as_example(x), tsopt.capture(model, x)).judge
    verdict = judge(lambda x: model(x.clamp(-8, 8)), precision="int8")
    assert not verdict.ok
    assert "on the large input: relative error" in verdict.reason


def test_on_inputs_of_ordinary_size_it_may_not():
    assert not lookup(1 / 4, precision="int8").ok


class Twice(Steep):
    def forward(self, x):
        wave = super().forward(x)
        return wave, -wave


def test_neighbours_are_computed_once_for_all_outputs_and_candidates(monkeypatch):
    computed, real = [], Values.compute
    monkeypatch.setattr(Values, "compute", lambda self, wanted: computed.append(len(wanted)) or real(self, wanted))
    judge = oracle(Twice()).judge
    for _ in range(3):
        verdict = judge(lambda x: (in_another_order(x), -in_another_order(x)))
        assert (verdict.ok, verdict.test) == (True, "float64"), verdict.reason
        assert 0 < len(computed) <= 1 + NOISE, "the values themselves, and each neighbour once"
    assert set(computed) == {2}, "of both outputs"


def test_answers_are_kept_by_what_was_moved_and_for_each_draw():
    answers, asked = Answers(), []

    def ask(inputs, number):
        return answers.answer(inputs, number, lambda: asked.append((inputs, number)) or [torch.tensor(number)])

    for _ in range(2):
        for inputs in "ab":
            assert [int(ask(inputs, number)[0]) for number in range(3)] == [0, 1, 2]
    assert asked == [(inputs, number) for inputs in "ab" for number in range(3)]


def test_answers_are_not_kept_where_they_would_take_too_much_memory(monkeypatch):
    monkeypatch.setattr(near, "MOST_BYTES", 8 * 4)
    answers, asked = Answers(), []
    for _ in range(2):
        for number in range(3):
            answers.answer("a", number, lambda number=number: asked.append(number) or [torch.zeros(4)])
    assert asked == [0, 1, 2, 2], "two fit"


def test_one_that_cannot_be_asked_for_is_asked_for_again():
    answers = Answers()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            answers.answer("a", 0, lambda: [1 / 0])
    assert answers.answer("a", 0, lambda: ["found"]) == ["found"]
