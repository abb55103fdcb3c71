"""What calibration data says nothing about has no range: what never varied, and what an input of zeros adds to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import seeded
from tsopt.passes.quantize.layers import layers_of, readers_of_integers
from tsopt.passes.quantize.observe import Observed, observe, qparams_of
from tsopt.passes.quantize.unseen import float_inputs, unseen_values

W = torch.randn(8, 8, generator=seeded(0))
X = torch.zeros(2, 8)


def varying(count=4, *shape):
    return [torch.randn(*(shape or (2, 8)), generator=seeded(i)) for i in range(count)]


def unseen(forward, calls):
    """The reasons, in graph order of the values."""
    program = tsopt.capture(Net(forward), calls[0])
    values = readers_of_integers(layers_of(program))
    ordered = [node for node in program.graph.nodes if node in values]
    observed = observe(program, calls, [*ordered, *float_inputs(program)], lambda text: None)
    return list(unseen_values(program, ordered, observed).values())


@pytest.mark.parametrize(("value", "said"), [(0.0, "zero"), (0.25, "0.25"), (-1e30, "-1e+30")])
def test_what_was_always_the_same_has_no_range(value, said):
    calls = [(x, torch.full((2, 8), value)) for x in varying()]
    reasons = unseen(lambda self, x, y: F.linear(x, W) + F.linear(y, W), calls)
    assert reasons == [f"its input was always {said} in the calibration data"]


def test_what_varied_once_has_a_range():
    calls = [(x, torch.zeros(2, 8)) for x in varying()] + [(torch.ones(2, 8), torch.randn(2, 8, generator=seeded(9)))]
    assert unseen(lambda self, x, y: F.linear(F.linear(x, W) + F.linear(y, W), W), calls) == []


ADDED = "it depends on arg1, which was always zero in the calibration data (add inputs where it is not)"
LSTM = [torch.randn(32, 8, generator=seeded(1)) for _ in range(2)] + [torch.zeros(32) for _ in range(2)]
GRU = [torch.randn(24, 8, generator=seeded(1)) for _ in range(2)] + [torch.zeros(24) for _ in range(2)]
LAYERS = (True, 1, 0.0, False, False, True)


def lstm(x, y, projected=False):
    if projected:
        weights = [LSTM[0], LSTM[1][:, :4], *LSTM[2:], LSTM[1][:4]]
        return torch.lstm(x[None], (y[None, :, :4], y[None]), weights, *LAYERS)
    return torch.lstm(x[None], (y[None], y[None]), LSTM, *LAYERS)


@pytest.mark.parametrize(
    ("between", "reasons"),
    [
        (lambda x, y: x + F.linear(y, W, W[0]), ["its input was always zero in the calibration data", ADDED]),
        (lambda x, y: (x + y).relu() * 2, [ADDED]),
        (lambda x, y: F.layer_norm(x + y, (8,)), []),
        (lambda x, y: x * y.sigmoid(), []),
        (lambda x, y: (x + y).clamp(-1, 1), []),
        (lambda x, y: (x + y).clamp(max=1), [ADDED]),
        (lambda x, y: torch.where(y > 0, x, -x), []),
        (lambda x, y: lstm(x, y)[0][0] * lstm(x, y)[1][0], []),
        (lambda x, y: torch.gru(x[None], y[None], GRU, *LAYERS)[0][0], [ADDED]),
        (lambda x, y: F.grid_sample(x[None, None], y.view(1, 2, 4, 2))[0, 0].repeat(1, 2), []),
        (lambda x, y: F.grid_sample((x + y)[None, None], y.view(1, 2, 4, 2))[0, 0].repeat(1, 2), [ADDED]),
        (lambda x, y: lstm(x, y)[1][0].sigmoid() * lstm(x, y)[2][0].tanh(), []),
        (lambda x, y: torch.cat((x, (x + y).tanh().relu())), []),
        (lambda x, y: (x + y).cos() - 1, []),
        (lambda x, y: F.linear(x, W) * y.sigmoid(), [ADDED]),
        (lambda x, y: lstm(x, y, projected=True)[0][0].repeat(1, 2), [ADDED]),
        (lambda x, y: F.grid_sample(x[None, None], y.view(1, 2, 4, 2), "bicubic")[0, 0].repeat(1, 2), [ADDED]),
        (lambda x, y: F.grid_sample(F.linear(x, W)[None, None], y.view(1, 2, 4, 2))[0, 0].repeat(1, 2), [ADDED]),
        (lambda x, y: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], y[:, :2])[0, 0], []),
        (lambda x, y: F.scaled_dot_product_attention(x[None], x[None], (x + y)[None])[0], [ADDED]),
    ],
    ids=[
        *("a layer", "a sum", "a norm", "a gate", "a range", "a bound", "a condition"),
        *("outputs of an LSTM", "outputs of a GRU", "places", "samples"),
        *("a product of gates", "a part", "a wave", "a gate for a value without bounds", "projected outputs"),
        *("cubic samples", "samples of a layer", "a mask", "attention"),
    ],
)
def test_what_an_input_of_zeros_adds_to_has_no_range(between, reasons):
    calls = [(x, torch.zeros(2, 8)) for x in varying()]
    assert unseen(lambda self, x, y: F.linear(between(x, y), W), calls) == reasons


def test_the_cells_of_an_lstm_depend_on_those_that_it_is_given():
    program = tsopt.capture(Net(lambda self, x, y: F.linear(lstm(x, y)[2][0], W)), (X, X))
    (value,) = readers_of_integers(layers_of(program))
    zero, seen = Observed(0.0, 0.0), Observed(-1.0, 1.0)
    first, second = float_inputs(program)
    observed = {first.name: seen, second.name: zero, value.name: seen}
    assert list(unseen_values(program, [value], observed).values()) == [ADDED]


def test_integers_and_other_constants_are_part_of_the_ranges():
    calls = [(x, torch.zeros(2, dtype=torch.int64), torch.full((2, 8), 0.5)) for x in varying()]
    assert unseen(lambda self, x, kind, scale: F.linear((x + F.embedding(kind, W)) * scale, W), calls) == []


def test_inputs_that_are_complex_or_of_one_byte_are_no_hindrance():
    calls = [(x, torch.zeros(2, 8, dtype=torch.complex64), torch.zeros(2, 8).to(torch.float8_e5m2)) for x in varying()]
    assert unseen(lambda self, x, y, z: (F.linear(x, W) + y, z.float() + x), calls) == []


def test_a_state_that_begins_with_zeros_is_seen_as_later_calls_leave_it():
    def forward(self, x):
        y = F.linear(x, W) + F.linear(self.kept, W)
        self.kept.copy_(y.tanh())
        return y

    program = tsopt.capture(Net(forward, kept=torch.zeros(2, 8)), varying()[0])
    values = list(readers_of_integers(layers_of(program)))
    observed = observe(program, [(x, torch.zeros(2, 8)) for x in varying()], values, lambda text: None)
    assert len(qparams_of(values, observed)) == 2
    (kept,) = [observed[node.name] for node in values if node.name.endswith("kept")]
    assert 0.5 < kept.high <= 1


@pytest.mark.parametrize("count", [1, 2])
def test_few_calls_are_repeated_to_see_a_state(count):
    def forward(self, x):
        y = F.linear(x + self.kept, W)
        self.kept.add_(1)
        return y

    program = tsopt.capture(Net(forward, kept=torch.zeros(2, 8)), torch.zeros(2, 8))
    (value,) = readers_of_integers(layers_of(program))
    calls = [(torch.zeros(2, 8), torch.zeros(2, 8))] * count
    assert observe(program, calls, [value], lambda text: None)[value.name].high == 7


def test_calls_that_cannot_follow_each_other_begin_anew():
    def forward(self, x):
        at = self.at.clone()
        self.at.add_(1)
        return F.linear(x + self.table[at], W)

    calls = [(x, torch.zeros(1, dtype=torch.int64)) for x in varying(8, 1, 8)]
    table = torch.arange(1.0, 4.0)[:, None].expand(3, 8).clone()
    program = tsopt.capture(Net(forward, at=torch.zeros(1, dtype=torch.int64), table=table), calls[0][0])
    (value,) = readers_of_integers(layers_of(program))
    found = observe(program, calls, [value], lambda text: None)[value.name]
    assert found.high > float(torch.cat([x for x, _ in calls]).max()) + 1, "the second row was read as well"


def ranges(forward, calls):
    """Of the values that layers read, as they are rounded."""
    program = tsopt.capture(Net(forward), calls[0])
    values = readers_of_integers(layers_of(program))
    ordered = [node for node in program.graph.nodes if node in values]
    observed = observe(program, calls, [*ordered, *float_inputs(program)], lambda text: None)
    assert unseen_values(program, ordered, observed) == {}
    return [params.range for params in qparams_of(ordered, observed).values()]


@pytest.mark.parametrize(
    ("between", "bounds"),
    [
        (lambda x, y: lstm(0.01 * x, y)[0][0], (-1, 1)),
        (lambda x, y: lstm(0.01 * x, y)[2][0].tanh(), (-1, 1)),
        (lambda x, y: (0.01 * x + y).sigmoid(), (0, 1)),
        (lambda x, y: (0.01 * x + y).clamp(-3, 4), (-3, 4)),
        (lambda x, y: (0.01 * x + y).erf(), (-1, 1)),
        (lambda x, y: (0.01 * x + y).atan(), (-1.57, 1.57)),
        (lambda x, y: F.relu6(0.01 * x + y), (0, 6)),
        (lambda x, y: F.hardsigmoid(0.01 * x + y), (0, 1)),
    ],
    ids=["LSTM", "tanh", "sigmoid", "clamp", "erf", "atan", "relu6", "hardsigmoid"],
)
def test_the_range_of_what_is_bounded_is_all_that_another_input_may_show(between, bounds):
    calls = [(x, torch.zeros(2, 8)) for x in varying()]
    ((low, high),) = ranges(lambda self, x, y: F.linear(between(x, y), W), calls)
    assert (low, high) == pytest.approx(bounds, abs=0.03)


def test_the_range_of_samples_is_that_of_the_image():
    calls = [(x, torch.zeros(2, 8)) for x in varying()]

    def forward(self, x, y):
        return F.linear(F.grid_sample(x[None, None], y.view(1, 2, 4, 2))[0, 0].repeat(1, 2), W)

    ((low, high),) = ranges(forward, calls)
    seen = torch.cat([x for x, _ in calls])
    assert (low, high) == pytest.approx((float(seen.min()), float(seen.max())), abs=0.05)


def test_a_range_that_no_input_of_zeros_adds_to_stays_as_the_data_shows_it():
    calls = [(x, torch.full((2, 8), 0.5)) for x in varying()]
    ((low, high),) = ranges(lambda self, x, y: F.linear((0.01 * x + y).sigmoid(), W), calls)
    assert 0 <= low <= high < 0.7
