"""Eager's answers: what it is asked, what it refuses, and what is left as it was."""

from __future__ import annotations

import copy
import signal

import pytest
import torch
from torch import nn

import tsopt
from tsopt.compiler.calls.example import Example
from tsopt.runtime.checking import eager_answers
from tsopt.runtime.checking.accuracy import Oracle
from tsopt.runtime.checking.extremes import EXTREME

NAN = float("nan")
ROW = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))


def test_input_sets_that_the_model_refuses_are_named():
    def model(x):
        if not torch.compiler.is_compiling() and float(x.abs().max()) > 50:
            raise ValueError("too large")
        return x * 2

    oracle = Oracle(model, Example((ROW,)), None)
    assert oracle.skipped == ["large: eager raises ValueError"]
    assert "large" not in oracle.judge(lambda x: x * 2).inputs


class Table(nn.Module):
    """Columns of codes, each with an embedding of its own size; may compare with the first codes that it saw."""

    def __init__(self, compares=False):
        super().__init__()
        torch.manual_seed(0)
        self.columns, self.compares = nn.ModuleList(nn.Embedding(size, 4) for size in (50, 3, 7)), compares
        self.first = None

    def forward(self, codes, x):
        y = torch.cat([column(codes[:, i]) for i, column in enumerate(self.columns)], 1) + x.exp()
        if not self.compares:
            return y
        self.first = codes.clone() if self.first is None else self.first
        return y + (codes - self.first).abs().sum()


def rows_of_codes():
    return Example((torch.tensor([[49, 0, 6], [12, 2, 1], [7, 1, 0], [30, 2, 5]]), torch.randn(4, 12)))


def test_codes_are_drawn_within_their_columns_where_the_model_takes_no_other():
    model = Table().eval()
    oracle = Oracle(model, rows_of_codes(), None)
    assert not [text for text in oracle.skipped if not text.startswith(EXTREME)]
    found = oracle.judge(model)
    assert {"example", "drawn-1", "drawn-2", "random", "large", "tiny"} <= set(found.inputs)
    drawn = {tuple(map(tuple, codes.tolist())) for codes in seen_by(model, oracle)}
    assert len(drawn) > 2, "they differ from the example"


def test_what_a_model_remembers_is_noticed_by_a_call_on_codes_that_it_takes():
    oracle = Oracle(Table(compares=True).eval(), rows_of_codes(), None)
    assert not oracle.judge(Table().eval()).ok


def seen_by(model, oracle):
    seen = []
    oracle.judge(lambda codes, x: (seen.append(codes.clone()), model(codes, x))[1])
    return seen


def test_input_sets_without_a_finite_answer_are_named():
    oracle = Oracle(lambda x: torch.where(x.abs().max() > 50, x / 0 - x / 0, x), Example((ROW,)), None)
    assert oracle.skipped == ["large: eager returns no finite value"]


def test_a_model_that_fails_on_its_example_is_told_where():
    def model(x):
        raise ValueError("no such luck")

    with pytest.raises(tsopt.AccuracyError, match="fails on the example input") as caught:
        Oracle(model, Example((ROW,)), None)
    assert "test_eager_answers.py" in caught.value.where
    assert "no such luck" in caught.value.why


def test_nothing_finite_is_nothing_verified():
    with pytest.raises(tsopt.AccuracyError, match="nothing can be verified"):
        Oracle(lambda x: x * NAN, Example((ROW,)), None)


def test_verification_leaves_buffers_rng_and_flags_alone():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5))
    model.register_buffer("seen", torch.zeros(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rng, dtype, grad = torch.get_rng_state(), torch.get_default_dtype(), torch.is_grad_enabled()
    Oracle(model, Example((ROW,)), None).judge(copy.deepcopy(model))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, grad)
    assert model.training


def test_inputs_on_which_the_model_does_not_end_are_left_out(monkeypatch):
    """A loop that values end, on values that nobody has meant."""
    monkeypatch.setattr(eager_answers, "PATIENCE", 0.2)

    def spins(x):
        while x.abs().max() > 50:
            x = x + 0
        return x * 2

    before = signal.getsignal(signal.SIGALRM)
    oracle = Oracle(spins, tsopt.example(torch.linspace(-1, 1, 12)), None)
    assert "large: eager raises TimeoutError" in oracle.skipped
    assert {"example", "drawn-1", "tiny"} <= {expected.inputs.kind for expected in oracle.expected}
    assert oracle.judge(spins).ok
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_capture_that_is_wrong_is_no_witness_for_itself():
    x = torch.randn(64, 32)
    wrong = tsopt.capture(lambda x: x * 1.001, x)
    verdict = Oracle(lambda x: x * 1.0, tsopt.example(x), wrong).judge(tsopt.compile(wrong, "eager"))
    assert not verdict.ok
    assert "no float64 reference" in verdict.reason


def amplified(x):
    return (x * 3e3).sin()


@pytest.mark.parametrize(("offset", "ok"), [(0.0, True), (5e-3, False)])
def test_without_a_program_the_model_shows_how_far_rounding_moves_it(offset, ok):
    """In a model in parts, too, rounding may be amplified beyond the tolerance of a single element."""
    verdict = Oracle(amplified, Example((ROW,)), None, few=True).judge(lambda x: (x * 30 * 100).sin() + offset)
    assert (verdict.ok, verdict.test) == (ok, "rounding" if ok else "element")
    assert not ok or str(verdict).startswith("as close to eager as eager is to itself")


def test_inputs_are_moved_by_one_rounding_of_the_finest_dtype():
    """Moved by one rounding of float16, the inputs would excuse a candidate that computes in it."""
    x = torch.rand(256, 9).half()
    verdict = Oracle(lambda x: x.float().mean(-1), Example((x,)), None).judge(lambda x: x.mean(-1).float())
    assert (verdict.ok, verdict.test) == (False, "element")


@pytest.mark.parametrize("wrong", [lambda x: x, lambda x: x * 1.005])
def test_noise_of_the_model_excuses_nothing(wrong):
    model = lambda x: x * (1 + 0.01 * torch.randn_like(x))  # noqa: E731
    assert not Oracle(model, Example((ROW,)), None).judge(wrong).ok


def test_a_model_that_decides_anew_shows_nothing():
    def model(x):
        return amplified(x) + (0.0 if float(x[0, 0]) == float(ROW[0, 0]) else 0.1)

    verdict = Oracle(model, Example((ROW,)), None, only="example").judge(lambda x: (x * 30 * 100).sin() + 0.05)
    assert (verdict.ok, verdict.test) == (False, "element")


def test_a_model_that_refuses_other_values_is_its_own_reference():
    def model(x):
        assert torch.equal(x, ROW)
        return amplified(x)

    verdict = Oracle(model, Example((ROW,)), None).judge(lambda x: (x * 30 * 100).sin())
    assert not verdict.ok
    assert "no float64 reference" in verdict.reason


@pytest.mark.parametrize("seconds", [[0.6], [0.6, 0.6, 0.1]])
def test_state_is_looked_for_where_calls_take_long_and_other_values_are_refused(monkeypatch, seconds):
    calls = []

    def model(x):
        assert torch.equal(x, ROW)
        calls.append(1)
        return x * len(calls)

    oracle = Oracle(taking(monkeypatch, model, *seconds), Example((ROW,)), None)
    assert [inputs.kind for inputs, _ in oracle.expected[0].again][:1] == ["example"]
    frozen = oracle.expected[0].leaves[0] / ROW
    verdict = oracle.judge(lambda x: x * frozen)
    assert not verdict.ok
    assert "repeated call 2" in verdict.reason


def test_what_a_model_writes_before_it_refuses_other_values_is_not_held_against_a_candidate(monkeypatch):
    class Counts(nn.Module):
        def __init__(self, refuses):
            super().__init__()
            self.count, self.refuses = 0, refuses

        def forward(self, x):
            self.count += 1
            assert not self.refuses or torch.equal(x, ROW)
            return x * self.count

    monkeypatch.setattr(eager_answers, "LONG_CALL", 0.0)
    oracle = Oracle(Counts(refuses=True), Example((ROW,)), None)
    assert oracle.judge(Counts(refuses=False)).ok


@pytest.mark.parametrize(("model", "asked"), [(torch.relu, 0), (lambda x: x + torch.rand_like(x), 5)])
def test_answers_on_the_example_are_those_that_are_known_unless_a_seed_decides(model, asked):
    def called(x):
        calls.append(torch.equal(x, ROW))
        return model(x)

    calls: list[bool] = []
    first = Oracle(called, Example((ROW,)), None, seed=1)
    calls.clear()
    second = Oracle(called, Example((ROW,)), None, seed=2, known=first)
    assert sum(calls) - 1 == max(0, asked - 2), "one of them looks for what refuses values that are made up"
    assert (second.expected[0] is first.expected[0]) == (asked == 0)
    assert not torch.equal(second.expected[1].leaves[0], first.expected[1].leaves[0])
    assert second.judge(called).ok


def test_a_few_input_sets():
    assert [e.inputs.kind for e in Oracle(torch.relu, tsopt.example(torch.randn(4)), None, few=True).expected] == [
        "example",
        "drawn-1",
    ]


@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        (0.001, {"example", "drawn-1", "drawn-2", "random", "large", "tiny", "special", "zeros"}),
        (0.5, {"example", "drawn-1", "special", "large", "zeros"}),
        (30.0, {"example", "drawn-1"}),
    ],
)
def test_a_model_whose_calls_take_long_is_asked_less(monkeypatch, seconds, kinds):
    oracle = Oracle(taking(monkeypatch, lambda x: x * 2, seconds), Example((ROW,)), None)
    assert {expected.inputs.kind for expected in oracle.expected} == kinds
    assert any(f"a call takes {seconds:.1f} s" in text for text in oracle.skipped) == (len(kinds) < 8)


@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        ([0.1], ["example", "drawn-1", "example"]),
        ([0.6], ["drawn-1", "example"]),
        # Only the first call is slow, as it often is.
        ([0.6, 0.6, 0.1], ["drawn-1", "example", "drawn-1", "example"]),  # the very first call looks for refusals
    ],
)
def test_where_calls_take_long_the_example_is_repeated_once(monkeypatch, seconds, kinds):
    calls = []
    model = taking(monkeypatch, lambda x: calls.append(1) or x * len(calls), *seconds)  # another answer in each call
    (expected, *_) = Oracle(model, Example((ROW,)), None).expected
    assert [inputs.kind for inputs, _ in expected.again] == kinds


def taking(monkeypatch, model, *seconds):
    """A model whose calls take these times, and the last of them from then on."""
    left = list(seconds)

    class Clock:
        now = 0.0

        @classmethod
        def perf_counter(cls):
            return cls.now

    def call(x):
        Clock.now += left.pop(0) if len(left) > 1 else left[0]
        return model(x)

    monkeypatch.setattr(eager_answers, "time", Clock)
    return call


def test_the_same_answer_is_held_once():
    """Those of a language model are large."""
    (expected, *_) = Oracle(lambda x: x * 2, Example((ROW,)), None).expected
    assert {leaf.data_ptr() for _, answer in expected.again for leaf in answer} == {expected.leaves[0].data_ptr()}


def test_another_answer_in_a_repeated_call_is_held_beside_the_first():
    calls = []

    def model(x):
        calls.append(1)
        return x * 2 + len(calls)

    (expected, *_) = Oracle(model, Example((ROW,)), None).expected
    values = [expected.leaves[0], *(answer[0] for inputs, answer in expected.again if inputs is expected.inputs)]
    assert [float((value - values[0]).mean()) for value in values] == pytest.approx([0, 1, 3], abs=1e-5)
    assert [inputs.kind for inputs, _ in expected.again] == ["example", "drawn-1", "example"]
