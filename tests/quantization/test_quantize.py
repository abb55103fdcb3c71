"""Quantization as a whole: what is made, of which data, and what costs only a layer."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn

import tsopt
from tests.passes.quantize.models import OwnInput, OwnScores, OwnWeight, Residual, images, mlp, seeded
from tests.quantization.helpers import BOTH, hard, layers, quantized, records, rows
from tsopt.compiler.calls.calibration import FOR_BOTH
from tsopt.compiler.calls.example import as_example
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.errors import NoGain, UsageError
from tsopt.quantization import measurements
from tsopt.quantization.measurements import Measurements
from tsopt.quantization.quantize import Int8Options, quantize


class Masked(nn.Module):
    """Of its two layers, one reads infinities."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.plain, self.masked = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.plain(x), self.masked(x.masked_fill(x > 0.5, -torch.inf))


def test_both_variants_are_made_and_every_layer_is_reported():
    found = quantized(Residual().eval(), images(1)[0], calibration=images(8))
    assert {name: len(layers(program)) for name, program in found.variants.items()} == {"int8": 3, "int8-static": 3}
    assert [layer.name for layer in records(found)] == ["stem", "inner", "head"]
    assert all(layer.sqnr > 30 and not layer.kept for layer in records(found))
    assert (records(found)[0].bytes_float, records(found)[0].bytes_int8) == (8 * 27 * 4, 8 * 27 + 8 * 4)
    assert found.calibration == "8 inputs"


def test_without_data_only_the_dynamic_variant_is_made():
    found = quantized(Residual().eval(), images(1)[0], wanted=("int8",))
    assert list(found.variants) == ["int8"]
    assert found.criterion is None
    assert found.calibration == ""


def test_nothing_is_made_where_nothing_is_asked_for():
    found = quantized(Residual().eval(), images(1)[0], wanted=("fp32", "bf16"))
    assert (found.variants, found.criterion, found.layers) == ({}, None, {})


def test_a_criterion_judges_other_precisions_too():
    assert quantized(Residual().eval(), images(1)[0], wanted=("bf16",), metric="cosine").criterion is not None


def test_a_model_without_layers_gains_nothing():
    found = quantized(nn.ReLU().eval(), rows(1)[0], calibration=rows(2))
    assert all(isinstance(made, NoGain) for made in found.variants.values())
    assert records(found) == ()


@pytest.mark.parametrize("model", [OwnWeight(), OwnInput(), OwnScores()], ids=lambda model: type(model).__name__)
def test_a_model_that_is_quantized_already_stays_as_it_is(model):
    x = torch.randn(1, 2, 64, 64, generator=seeded(0))
    found = quantized(model.eval(), x, wanted=(*BOTH, "int8-weights"), calibration=[x, x + 1])
    assert [str(made).partition("\n")[0] for made in found.variants.values()] == ["the model is quantized already"] * 3


def test_layers_are_chosen_on_other_inputs_than_those_that_judge(monkeypatch):
    tried = []
    plain = Measurements._judged

    def judged(self, made, by):
        tried.append(by.judge(model).text.partition(", limit")[0])
        return plain(self, made, by)

    monkeypatch.setattr(Measurements, "_judged", judged)
    model = Residual().eval()
    assert quantized(model, images(1)[0], calibration=images(64)).layers_in("int8-static")
    on_eight, on_others = "relative error 0.00% on 8 inputs", "relative error 0.00% on 24 inputs"
    assert tried == 2 * [on_eight, on_others], "of each variant, the choice and what it is worth on others"
    tried.clear()
    assert quantized(model, images(1)[0], calibration=images(20)).layers_in("int8-static")
    assert tried == 2 * [on_eight, "relative error 0.00% on 10 inputs"]


def test_a_number_of_inputs_is_drawn_and_said_to_be():
    found = quantized(Residual().eval(), images(1)[0], calibration=6)
    assert found.calibration == "6 inputs drawn like the example, which says little about real data"
    assert len(layers(found.variants["int8-static"])) == 3


class Table(nn.Module):
    """Each column has codes of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.columns = nn.ModuleList(nn.Embedding(size, 8) for size in (2, 50))
        self.head = nn.Linear(16, 4)

    def forward(self, codes):
        return self.head(torch.cat([column(codes[:, i]) for i, column in enumerate(self.columns)], dim=1))


def test_codes_of_a_table_are_drawn_within_their_columns():
    codes = torch.stack([torch.arange(40) % 2, torch.arange(40) + 10], dim=1)
    found = quantized(Table().eval(), codes, calibration=6)
    assert found.calibration.startswith("6 inputs drawn like the example")
    assert len(layers(found.variants["int8-static"])) == 1


class CodesAsFloats(nn.Module):
    """A table whose first column is a code among numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.column, self.head = nn.Embedding(5, 64), nn.Linear(66, 4)

    def forward(self, x):
        return self.head(torch.cat([self.column(x[:, 0].long()), x[:, 1:]], dim=1))


class EachOnce(nn.Module):
    """Takes each code once, as no drawn input has it."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding.from_pretrained(torch.randn(8, 64, generator=seeded(0)))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        codes = x[:, 0].long()
        wrong = (codes.sort().values != torch.arange(8)).any().long()
        return self.head(self.codes(codes + 99 * wrong))


@pytest.mark.parametrize("calibration", [None, 6])
@pytest.mark.parametrize("metric", [None, "cosine", lambda model: 1.0], ids=["error", "cosine", "function"])
def test_drawn_inputs_that_the_model_refuses_are_left_out(calibration, metric):
    table = torch.cat([torch.arange(8.0)[:, None] % 5, torch.randn(8, 2, generator=seeded(0))], dim=1)
    options = {"calibration": calibration, "metric": metric, "wanted": ("int8", "int8-static", "bf16")}
    found = quantized(CodesAsFloats().eval(), table, **options)
    assert len(layers(found.variants["int8"])) == 1
    said = "6 inputs drawn like the example, which says little about real data"
    assert found.calibration == (said if calibration else "")
    found = quantized(EachOnce().eval(), torch.arange(8.0)[:, None], **options)
    assert len(layers(found.variants["int8"])) == 1
    few = "1 of 6 inputs (the model refuses others) drawn like the example"
    assert found.calibration.startswith(few if calibration else "")


def test_a_metric_in_another_precision_leaves_out_what_the_model_refuses():
    table = torch.cat([torch.arange(8.0)[:, None] % 5, torch.randn(8, 2, generator=seeded(0))], dim=1)
    found = quantized(CodesAsFloats().eval(), table, wanted=("bf16",), metric="cosine")
    assert found.criterion.judge(CodesAsFloats().eval()).ok


@pytest.mark.parametrize("data", [1, [torch.zeros(1, 4)]])
def test_the_report_says_that_one_input_is_not_held_out(data):
    found = quantized(mlp(4, 4), rows(1, 4)[0], calibration=data)
    assert found.calibration.startswith("1 input")
    assert found.calibration.endswith(FOR_BOTH)


@pytest.mark.parametrize("count", [0, -1, True])
def test_a_number_of_inputs_is_at_least_one(count):
    with pytest.raises(UsageError, match="calibration must be at least 1"):
        Int8Options(calibration=count).check()


def test_progress_says_what_is_done():
    said: list[str] = []
    quantized(Residual().eval(), images(1)[0], calibration=images(4), wanted=("int8-static",), progress=said.append)
    assert said[:5] == [*(f"quantize: read {count} inputs" for count in (1, 2, 3, 4)), "quantize: smooth 1 of 2"]
    assert "quantize: observe 4 of 4" in said
    assert "quantize: measure 2 of 2" in said
    assert said[-1] == "quantize: 3 of 3 layers"


def test_the_weights_of_one_trial_are_gone_when_the_next_one_begins(monkeypatch):
    trials: list[weakref.ref] = []
    alive: list[int] = []

    def simulated(program):
        alive.append(sum(weight() is not None for weight in trials))
        made = original(program)
        trials.extend(
            weakref.ref(weight) for name, weight in (made.weights | program.weights).items() if "int8" in name
        )
        return made

    original = measurements.simulated
    monkeypatch.setattr(measurements, "simulated", simulated)
    monkeypatch.setattr(measurements, "WORTH_FREEING", 0)
    gc.disable()  # what it would find in the meantime is a matter of chance
    try:
        quantized(hard(), rows(1)[0], calibration=rows(16))
    finally:
        gc.enable()
    assert len(alive) > 1
    assert trials
    assert set(alive) == {0}


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    quantized(model, images(1)[0], calibration=images(4), metric=lambda m: float(m(images(1)[0]).sum() * 0), max_drop=1)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_data_gives_the_same_program():
    found = {
        quantized(Residual().eval(), images(1)[0], calibration=images(8))
        .variants["int8-static"]
        .fingerprint(contents=True)
        for _ in range(3)
    }
    assert len(found) == 1


def test_a_metric_that_fails_is_the_users_error():
    def metric(model):
        raise FileNotFoundError("labels.csv")

    with pytest.raises(UsageError, match="the metric raises FileNotFoundError"):
        tsopt.optimize(mlp(4, 4), rows(1, 4)[0], precision="int8", metric=metric, backends=("onednn",), seconds=0.1)


def test_sizes_that_may_differ_are_calibrated_at_those_of_the_data():
    model = Residual().eval()
    program = tsopt.transform(tsopt.capture(model, images(1)[0], dynamic={"x": {0: "batch"}}))
    data = [torch.cat(images(3, i)) for i in range(4)]
    found = quantize(model, program, as_example(images(1)[0]), BOTH, Int8Options(calibration=data))
    made = found.variants["int8-static"]
    with torch.no_grad():
        (answer,), wanted = made.module()(data[0]), model(data[0])
    assert float((answer - wanted).norm() / wanted.norm()) < 0.04


def test_what_is_not_finished_in_time_is_not_made():
    found = quantized(Residual().eval(), images(1)[0], seconds=0.0, max_drop=0.1)
    said = "quantization did not finish within 0 s, its share of the budget"
    assert {name: made.what for name, made in found.variants.items()} == {"int8": said, "int8-static": said}
    assert found.criterion is not None, "candidates in other precisions are judged all the same"


@pytest.mark.parametrize(("budget", "limit"), [(None, math.inf), (30.0, 15.0)])
def test_the_budget_is_for_quantization_and_candidates(monkeypatch, budget, limit):
    class Seen(BaseException):
        """Ends `optimize` where the race begins."""

    def quantized(*args, seconds, **options):
        assert seconds == limit
        return quantize(*args, seconds=seconds, **options)

    def race(model, captured, programs, example, settings, **options):
        raise Seen(settings.budget)

    monkeypatch.setattr("tsopt.request.quantize", quantized)
    monkeypatch.setattr("tsopt.request.race", race)
    options = {"precision": "int8", "isolate": False, "cache": False, "backends": ("onednn",)}
    with pytest.raises(Seen) as caught:
        tsopt.optimize(mlp(4, 4), rows(1, 4)[0], budget=budget, **options)
    (left,) = caught.value.args
    assert left is None if budget is None else 0 < left < budget


def test_a_bug_in_quantization_costs_only_int8(monkeypatch, caplog):
    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tsopt.quantization.measurements.losses_with_effects", broken)
    found = quantized(Residual().eval(), images(1)[0], calibration=images(2))
    assert [made.what for made in found.variants.values()] == [
        "internal error in tsopt while quantizing: ZeroDivisionError: a bug"
    ] * 2
    assert "internal error in tsopt while quantizing Residual" in caplog.text


@pytest.mark.parametrize("data", [None, 32])  # few inputs do not show the range of others
def test_a_layer_whose_input_is_not_finite_costs_only_itself(data):
    found = quantized(Masked().eval(), torch.randn(4, 8, generator=seeded(0)), calibration=data)
    assert {layer.name: layer.kept for layer in records(found)} == {"plain": "", "masked": "its input is not finite"}
    made = [program for program in found.variants.values() if not isinstance(program, NoGain)]
    assert [len(layers(program)) for program in made] == [1] * len(made)
    assert made


class Attention(nn.Module):
    """Attention whose mask is an input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).mT + mask
        return self.out((scores / 2).softmax(-1) @ x)


def test_infinities_in_a_mask_cost_no_layer():
    def masked_by(value):
        mask = torch.zeros(1, 4, 4).masked_fill(torch.arange(4) > 2, value)
        data = [(torch.randn(1, 4, 8, generator=seeded(i)), mask) for i in range(16)]
        return quantized(Attention().eval(), data[0], calibration=data)

    found = masked_by(-torch.inf)
    assert found.calibration == "16 inputs; infinities in mask"
    assert records(found) == records(masked_by(-1e9))


def test_infinities_that_reach_a_layer_cost_only_this_layer():
    data = [(torch.randn(16, 8, generator=seeded(i)), torch.full((16, 8), -torch.inf)) for i in range(32)]
    model = nn.ModuleDict({"plain": nn.Linear(8, 4), "masked": nn.Linear(8, 4)})
    model.forward = lambda x, mask: (model["plain"](x), model["masked"](mask).isnan())
    found = quantized(model.eval(), data[0], calibration=data)
    assert {layer.name: layer.kept for layer in records(found)} == {"plain": "", "masked": "its input is not finite"}


def test_what_progress_raises_is_the_callers():
    def stop(text):
        if "observe 2" in text:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough"):
        quantized(Residual().eval(), images(1)[0], calibration=images(4), progress=stop)


@pytest.mark.parametrize("place", [0, 1])
def test_an_input_that_the_model_does_not_take_is_the_users_error(place):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    data = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    data[place] = torch.tensor([3, 99])
    with pytest.raises(
        UsageError,
        match=r"the model fails on a calibration input\n(  where: .*\n)?  why: IndexError: .*\n  fix: leave out",
    ):
        quantized(model, torch.tensor([1, 2]), calibration=data)


def test_state_is_the_same_for_each_call():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp(8, 8, seed=3)
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls += 1
            return self.inner(x) * self.calls

    model = Counting().eval()
    found = quantized(model, rows(1, 8)[0], calibration=rows(8, 8), metric="cosine", max_drop=0.01)
    assert all(not isinstance(made, NoGain) for made in found.variants.values())
    assert float(model.calls) == 0


def test_more_inputs_than_are_needed_are_not_drawn():
    found = quantized(mlp(4, 4), torch.randn(1, 4), calibration=10**9)
    assert found.calibration.startswith("128 inputs")


@pytest.mark.skipif(largest_weight() < 127, reason="int8 weights are not tried on this processor")
def test_int8_weights_are_judged_at_the_sizes_of_the_data():
    program = tsopt.capture(mlp(64, 64), torch.randn(2, 64), dynamic={"input": {0: "batch"}})
    data = [torch.randn(16, 64, generator=seeded(i)) for i in range(4)]
    made = quantize(
        mlp(64, 64), program, as_example(torch.randn(2, 64)), ("int8-weights",), Int8Options(calibration=data)
    )
    assert layers(made.variants["int8-weights"])


def test_a_layer_that_is_not_finite_is_not_counted_twice():
    found = quantized(Masked().eval(), torch.randn(4, 8, generator=seeded(0)), calibration=32)
    assert {name: len(layers(program)) for name, program in found.variants.items()} == {"int8": 1, "int8-static": 1}
