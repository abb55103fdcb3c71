from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import tsopt
from tsopt.runtime.checking.accuracy import Oracle, verify

NAN, INF = float("nan"), float("inf")


# ---- seeded mistakes: a wrong candidate against a model -----------------------------------------------------

TWO = (torch.randn(4, 4, generator=torch.Generator().manual_seed(5)),) * 2
PAIR = (TWO[0], TWO[0].flip(0) + 0.5)
ROW = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(7)) / 3
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
TABLE = torch.randn(10, 3, generator=torch.Generator().manual_seed(8))

MISTAKES = {
    "a dropped node": (lambda x: torch.relu(x @ WEIGHT), lambda x: x @ WEIGHT, ROW),
    "swapped operands of sub": (lambda x, y: x - y, lambda x, y: y - x, PAIR),
    "swapped operands of div": (lambda x, y: x / (y * y + 1), lambda x, y: (y * y + 1) / x, PAIR),
    "swapped operands of matmul": (lambda x, y: x @ y, lambda x, y: y @ x, PAIR),
    "another axis": (lambda x: x.sum(0), lambda x: x.sum(1), TWO[0]),
    "keepdim flipped": (lambda x: x.sum(1), lambda x: x.sum(1, keepdim=True), ROW),
    "eps dropped": (
        lambda x: F.layer_norm(x, (8,), eps=1e-5),
        lambda x: F.layer_norm(x, (8,), eps=0.0),
        ROW,
    ),
    "a bias forgotten": (lambda x: F.linear(x, WEIGHT, WEIGHT[0]), lambda x: F.linear(x, WEIGHT), ROW),
    "a scale off by a thousandth": (lambda x: x @ WEIGHT, lambda x: x @ (WEIGHT * 1.001), ROW),
    "relu as identity for a positive example": (torch.relu, lambda x: x.clone(), torch.rand(8, 8)),
    "another dtype": (lambda x: x.sum(), lambda x: x.double().sum(), ROW),
    "a constant cut to f16": (lambda x: x @ WEIGHT, lambda x: x @ WEIGHT.half().float(), ROW),
    "a transposed square": (lambda x: x * 2, lambda x: (x * 2).t(), TWO[0]),
    "the first row for all": (lambda x: x * 2, lambda x: (x * 2)[:1].expand(4, 8), ROW),
    "the last element": (
        lambda x: x * 2,
        lambda x: (x * 2) * torch.tensor([1.0] * 7 + [1.01]),
        ROW,
    ),
    "swapped outputs": (lambda x: (x + 1, x * 2), lambda x: (x * 2, x + 1), ROW),
    "fewer outputs": (lambda x: (x + 1, x * 2), lambda x: (x + 1,), ROW),
    "more outputs": (lambda x: (x + 1,), lambda x: (x + 1, x), ROW),
    "a bare tensor for a tuple": (lambda x: (x + 1,), lambda x: x + 1, ROW),
    "a list for a tuple": (lambda x: (x + 1, x), lambda x: [x + 1, x], ROW),
    "other keys": (lambda x: {"a": x + 1}, lambda x: {"b": x + 1}, ROW),
    "None for a tensor": (lambda x: (x + 1, x * 2), lambda x: (x + 1, None), ROW),
    "another constant beside the tensor": (lambda x: (x + 1, 3), lambda x: (x + 1, 4), ROW),
    "f64 computed in f32": (lambda x: x.exp(), lambda x: x.float().exp().double(), ROW.double()),
    "an index of another width": (lambda x: x.argmax(1), lambda x: x.argmax(1).int(), ROW),
    "gelu tanh for erf": (F.gelu, lambda x: F.gelu(x, approximate="tanh"), ROW),
    "softmax over another axis": (lambda x: x.softmax(0), lambda x: x.softmax(1), TWO[0]),
    "a mask inverted": (lambda x: x.masked_fill(x > 0, 0.0), lambda x: x.masked_fill(x <= 0, 0.0), ROW),
    "dropout kept on": (lambda x: x * 2, lambda x: F.dropout(x * 2, 0.5), ROW),
    "a saturating cast": (
        lambda x: (x * 100).to(torch.int32),
        lambda x: (x * 100).clamp(-128, 127).to(torch.int32),
        ROW,
    ),
    "wrong for large values only": (lambda x: x * 2, lambda x: (x * 2).clamp(-60, 60), ROW),
    "wrong for tiny values only": (lambda x: x.sign(), lambda x: x.sign() * (x.abs() > 1e-2), ROW),
    "another row of a table": (lambda i: TABLE[i], lambda i: TABLE[i.flip(0)], IDS),
    "boolean output negated": (lambda x: x > 0, lambda x: x <= 0, ROW),
    "argmin for argmax": (lambda x: x.argmax(1), lambda x: x.argmin(1), ROW),
}


@pytest.mark.sliced(18)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_seeded_mistake_is_caught(name):
    model, candidate, example = MISTAKES[name]
    with pytest.raises(tsopt.AccuracyError, match="does not compute the same values as the model"):
        verify(model, candidate, example)


def test_a_cached_result_is_caught():
    kept = []

    def candidate(x):
        kept.append(kept[0] if kept else x * 2)
        return kept[0]

    with pytest.raises(tsopt.AccuracyError):
        verify(lambda x: x * 2, candidate, ROW)


def test_a_candidate_that_writes_to_its_input_is_caught():
    def candidate(x):
        out = x * 2
        x.zero_()
        return out

    with pytest.raises(tsopt.AccuracyError, match="input"):
        verify(lambda x: x * 2, candidate, ROW)


def test_a_candidate_that_loses_a_write_to_the_input_is_caught():
    with pytest.raises(tsopt.AccuracyError, match="input"):
        verify(lambda x: x.add_(1) * 2, lambda x: (x + 1) * 2, ROW)


class ReturnsItsBuffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x):
        self.seen.add_(x)
        return x * 2, self.seen, self.seen[1:]


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_a_buffer_that_is_returned_is_compared_as_the_call_has_left_it(backend):
    model = ReturnsItsBuffer()
    assert verify(model, tsopt.compile(tsopt.capture(model, ROW), backend), ROW).ok
    assert not model.seen.any()

    def other(x):
        model.seen.add_(x)
        return x * 2, model.seen + 1, model.seen[1:]

    with pytest.raises(tsopt.AccuracyError, match="1 on the example input"):
        verify(model, other, ROW)


def test_an_output_in_memory_that_the_next_call_reuses_is_caught():
    kept = torch.empty_like(ROW)
    with pytest.raises(tsopt.AccuracyError):
        verify(lambda x: x * 2, lambda x: torch.mul(x, 2, out=kept), ROW)


def test_a_candidate_that_is_wrong_only_at_nan_is_caught():
    with pytest.raises(tsopt.AccuracyError):
        verify(lambda x: x * 2, lambda x: x.nan_to_num() * 2, ROW, exact=True)


def test_an_output_far_below_one_is_not_hidden_by_the_absolute_tolerance():
    with pytest.raises(tsopt.AccuracyError):
        verify(lambda x: x * 1e-8, torch.zeros_like, ROW)


def test_a_difference_of_outputs_near_zero_is_said_to_say_little():
    def model(x):
        return x.sigmoid() * 1e-12

    example = tsopt.example(torch.linspace(-1, 1, 12))
    verdict = Oracle(model, example, None).judge(lambda x: (x.double().sigmoid() * 1e-12).float())
    assert verdict.ok
    assert any("outputs are near zero (at most" in note for note in verdict.notes)
    usual = Oracle(torch.sigmoid, example, None).judge(lambda x: x.double().sigmoid().float())
    assert not any("near zero" in note for note in usual.notes)


def test_the_reason_names_the_output_and_the_input_set():
    with pytest.raises(tsopt.AccuracyError) as caught:
        verify(lambda x: {"a": x * 2, "b": x}, lambda x: {"a": x * 2, "b": x + 1}, ROW)
    assert caught.value.why.startswith("b on the example input: ")
    assert caught.value.exit_code == 1


def test_a_candidate_that_raises_is_a_backend_error_with_its_cause():
    def candidate(x):
        raise KeyError("gone")

    with pytest.raises(tsopt.BackendError, match="KeyError: 'gone'") as caught:
        verify(lambda x: x * 2, candidate, ROW)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_right_candidate_passes_on_seven_input_sets():
    verdict = verify(lambda x: x @ WEIGHT, lambda x: (WEIGHT.t() @ x.t()).t(), ROW)
    assert verdict.ok
    assert verdict.inputs == ("example", "drawn-1", "drawn-2", "random", "large", "tiny", "zeros")
    assert f"on {len(verdict.inputs)} input sets" in str(verdict)
    assert len(verdict.differences) == len(verdict.sizes) == len(verdict.inputs)


def test_an_epsilon_that_is_lost_is_seen_on_zeros():
    def normed(x):
        return x / (x.norm(dim=-1, keepdim=True) + 1e-8), x

    with pytest.raises(tsopt.AccuracyError) as caught:
        verify(normed, lambda x: (x / x.norm(dim=-1, keepdim=True), x), ROW)
    assert caught.value.why == "0 on the zeros input: NaN at different positions than in eager"


def other_on_zeros(model, other):
    return verify(model, lambda x: model(x) if x.any() else other(x), ROW)


@pytest.mark.parametrize(
    ("model", "other"),
    [
        (lambda x: (x >= 0) * 2.0, lambda x: (x > 0) * 2.0),
        (lambda x: (x @ WEIGHT >= 0) * 2.0, lambda x: (x @ WEIGHT > 0) * 2.0),
        (lambda x: x.sign() + 1, lambda x: x.sign() + 2),
        (lambda x: x.sigmoid(), lambda x: x.sigmoid() + 1),
        (lambda x: (x.sigmoid(), x.argsort(-1)), lambda x: (x.sigmoid() + 1, x.argsort(-1))),
        (lambda x: x.amax(-1) >= 0, lambda x: x.amax(-1) > 0),
    ],
    ids=["comparison", "of a product", "sign", "values", "beside an order", "maximum"],
)
def test_another_value_on_zeros_is_wrong(model, other):
    with pytest.raises(tsopt.AccuracyError, match="on the zeros input"):
        other_on_zeros(model, other)


def test_a_sign_of_zero_that_is_lost_is_seen_where_it_is_read():
    right = lambda y, x: torch.atan2(y + 0.0, x)  # noqa: E731
    with pytest.raises(tsopt.AccuracyError, match="on the zeros input"):
        verify(right, torch.atan2, (ROW, ROW))
    assert verify(lambda x: x + 0.0, lambda x: x.clone(), ROW).test == "element"


BIAS = torch.full((8,), 0.1)


@pytest.mark.parametrize(
    ("model", "other"),
    [
        (lambda x: x.argmax(-1) * 2.0, lambda x: x.argmax(-1) * 2.0 + 14),
        (lambda x: x.max(-1).indices, lambda x: x.max(-1).indices + 7),
        (lambda x: x.topk(2).indices, lambda x: x.topk(2).indices + 5),
        (lambda x: x.argsort(-1), lambda x: x.argsort(-1).flip(-1)),
        (
            lambda x: (x + BIAS >= (x + BIAS).cumsum(-1)[:, -1:] / 8) * 2.0,
            lambda x: (x + BIAS < (x + BIAS).cumsum(-1)[:, -1:] / 8) * 2.0,
        ),
    ],
    ids=["argmax", "max", "topk", "argsort", "a comparison that rounding decides"],
)
def test_an_order_of_equal_values_on_zeros_is_a_note_and_wrong_where_bits_count(model, other):
    verdict = other_on_zeros(model, other)
    assert verdict.notes[0].startswith("differs from eager if all inputs are zero: output on the zeros input: ")
    with pytest.raises(tsopt.AccuracyError, match="on the zeros input"):
        verify(model, lambda x: model(x) if x.any() else other(x), ROW, exact=True)


def test_exact_asks_for_bits():
    assert verify(lambda x: x * 2, lambda x: x + x, ROW, exact=True).test == "bits"
    with pytest.raises(tsopt.AccuracyError, match="not bit-equal"):
        verify(lambda x: x.sum(), lambda x: x.flip(0, 1).cumsum(0)[-1].sum() * (1 + 2e-7), ROW, exact=True)


def test_a_view_with_other_strides_passes():
    assert verify(lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), ROW).ok


def test_a_random_model_equals_itself():
    assert verify(lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5), ROW).test == "bits"


def test_the_example_is_not_written_to():
    example = torch.ones(3)
    verify(lambda x: x.add_(1), lambda x: x.add_(1), example)
    assert torch.equal(example, torch.ones(3))


# ---- NaN and infinities -------------------------------------------------------------------------------------


def judged_on_relu(candidate, **options):
    x = torch.linspace(-2, 2, 64)
    return Oracle(torch.relu, tsopt.example(x), tsopt.capture(torch.relu, x), **options).judge(candidate)


def loses_nan(x):
    return torch.where(x > 0, x, torch.zeros(()))


def raises_on_nan(x):
    if x.isnan().any():
        raise ValueError("no number")
    return torch.relu(x)


def test_what_differs_on_nan_is_a_note():
    verdict = judged_on_relu(loses_nan)
    assert verdict.ok
    assert "special" not in verdict.inputs
    assert "NaN at different positions than in eager" in verdict.notes[0]
    assert judged_on_relu(torch.relu).notes == ()


def test_what_differs_on_nan_is_a_verdict_where_it_was_asked_for():
    verdict = judged_on_relu(loses_nan, strict_specials=True)
    assert not verdict.ok
    assert "special input" in verdict.reason
    assert "special" in judged_on_relu(torch.relu, strict_specials=True).inputs


def test_a_candidate_that_fails_on_nan_is_noted_and_out_where_it_was_asked_for():
    assert "the candidate raises ValueError" in judged_on_relu(raises_on_nan).notes[0]
    with pytest.raises(ValueError, match="no number"):
        judged_on_relu(raises_on_nan, strict_specials=True)


def test_what_differs_where_eager_makes_infinities_of_extremes_is_a_note():
    def model(x):
        return x * x * x

    x = torch.linspace(-2, 2, 64, dtype=torch.float64) * 1e100
    oracle = Oracle(model, tsopt.example(x), tsopt.capture(model, x))
    assert oracle.judge(model).ok


def test_a_formula_that_overflows_is_found_with_an_example_of_small_numbers():
    with pytest.raises(tsopt.AccuracyError, match="large"):
        verify(F.logsigmoid, lambda x: torch.sigmoid(x).log(), torch.randn(8, 8) / 10)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_inputs_and_outputs_of_one_byte_are_compared(dtype):
    def model(x, y):
        return (x.float() * 2 + y).to(dtype), x.float() + y

    x = torch.rand(4, 3).to(dtype), torch.rand(4, 3)
    run = tsopt.compile(tsopt.transform(tsopt.capture(model, x)), "torchscript")
    assert tsopt.verify(model, run, x).ok
    with pytest.raises(tsopt.AccuracyError):
        tsopt.verify(lambda x, y: ((x.float() * 3 + y).to(dtype), x.float() + y), run, x)


def test_differences_are_told_for_each_input_set():
    """Those of too large inputs are among them, and not in the largest of all."""
    found = Oracle(lambda x: x @ WEIGHT, tsopt.example(ROW), None).judge(lambda x: x @ WEIGHT * (1 + 1e-6))
    assert found.ok
    known = dict(zip(found.inputs, found.differences, strict=True))
    sizes = dict(zip(found.inputs, found.sizes, strict=True))
    for kind, size in sizes.items():
        assert known[kind] == pytest.approx(1e-6 * size, rel=0.5, abs=1e-7)
    assert known["large"] > found.max_difference == max(known[kind] for kind in known if kind != "large")


def test_the_set_on_which_a_candidate_is_wrong_is_the_last_one_that_is_told():
    found = Oracle(lambda x: x @ WEIGHT, tsopt.example(ROW), None).judge(lambda x: x @ WEIGHT + 1)
    assert (found.ok, found.inputs) == (False, ("example",))
    assert found.differences == (pytest.approx(1.0),)


def test_of_integers_there_is_no_size():
    found = Oracle(torch.argmax, tsopt.example(torch.ones(4)), None).judge(torch.argmax)
    assert set(found.sizes) == {0.0}
