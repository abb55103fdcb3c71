"""Which layers stay in float32: those that lose most, and those that the user names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import tsopt
from tests.compiler.helpers import Net
from tests.passes.quantize.models import Residual, images, mlp, seeded
from tests.quantization.helpers import hard, layers, quantized, records, rows
from tsopt.compiler.graph.fake_quantized import simulated
from tsopt.compiler.graph.quantized import largest_weight
from tsopt.errors import NoGain, UsageError
from tsopt.quantization.measurements import Measurements
from tsopt.runtime.backends.backend import compile
from tsopt.runtime.backends.candidate import Candidate
from tsopt.runtime.checking import answers
from tsopt.runtime.checking.criterion import Judgement
from tsopt.runtime.layer_table import lines


def test_the_layer_that_loses_most_stays_in_float32():
    found = quantized(hard(), rows(1)[0], calibration=rows(16))
    kept = {layer.name: layer.kept for layer in records(found) if layer.kept}
    assert kept == {"4": "SQNR below 20 dB"}
    assert len(layers(found.variants["int8-static"])) == 3


def test_the_criterion_keeps_more_layers_in_float32():
    model = mlp(16, 16, 16, 8)
    calls = rows(16, 16)
    generous = quantized(model, calls[0], calibration=calls, metric="cosine", max_drop=0.5)
    strict = quantized(model, calls[0], calibration=calls, metric="cosine", max_drop=4e-6)
    assert len(layers(generous.variants["int8-static"])) == 3
    kept = [
        layer for layer in records(strict) if layer.kept == "the quantized layers together exceed the accuracy limit"
    ]
    assert kept
    program = strict.variants["int8-static"]
    assert len(kept) == 3 - (0 if isinstance(program, NoGain) else len(layers(program)))


@pytest.mark.parametrize(("size", "first"), [(1, 2000), (1, 3000), (16, 2000), (16, 3000)])
def test_the_choice_holds_on_all_inputs_that_candidates_are_judged_by(size, first):
    calls = [torch.randn(size, 32, generator=seeded(first + i)) for i in range(128)]
    found = quantized(mlp(32, 64, 64, 64, 10), calls[0], calibration=calls, metric="top1", max_drop=0.01)
    made = [program for program in found.variants.values() if not isinstance(program, NoGain)]
    assert made
    assert all(found.criterion.judge(compile(simulated(program), "eager")).ok for program in made)


class TwoWays(nn.Module):
    """Two layers side by side: the one whose own error is larger hardly counts for the output."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.matters, self.hardly = nn.Linear(64, 8), nn.Linear(64, 8)
        with torch.no_grad():
            self.hardly.weight[:, 0] *= 40  # fewer steps are left for the others

    def forward(self, x):
        return self.matters(x) + 1e-4 * self.hardly(x)


def test_the_layer_that_counts_for_the_output_is_kept():
    calls = rows(16, 64)
    found = quantized(TwoWays().eval(), calls[0], calibration=calls, metric="cosine", max_drop=1e-6)
    matters, hardly = records(found)
    assert (bool(matters.kept), hardly.kept) == (True, "")
    assert hardly.sqnr < matters.sqnr
    assert hardly.output_sqnr > matters.output_sqnr + 40


class Classes(nn.Module):
    """Returns the largest of the scores that its last layer, which loses most, gives; and what the first one gives."""

    def __init__(self, with_first):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 5)
        self.with_first = with_first
        with torch.no_grad():
            self.last.weight[:, 0] = 0

    def forward(self, x):
        first = self.first(x)
        y = self.second(first.relu())
        classes = self.last(torch.cat((torch.full_like(y[:, :1], 8.0), y[:, 1:]), 1)).argmax(-1)
        return (first, classes) if self.with_first else classes


@pytest.mark.parametrize("with_first", [False, True], ids=["classes", "classes and an output"])
def test_layers_that_lose_most_are_kept_where_gradients_do_not_tell(with_first):
    x = torch.randn(512, 64, generator=seeded(0))
    found = quantized(Classes(with_first).eval(), x, wanted=("int8",), metric="cosine", max_drop=0.02)
    kept = [layer.name for layer in records(found, "int8") if layer.kept]
    assert kept == ["last"]
    assert [layer.output_sqnr for layer in records(found, "int8")][1:] == [None, None]


def test_a_limit_that_nothing_meets_keeps_all_in_float32():
    found = quantized(Residual().eval(), images(1)[0], calibration=images(8), metric="cosine", max_drop=0.0)
    for made in found.variants.values():
        assert isinstance(made, NoGain)
        assert "no layer can run in int8: cosine similarity to eager 0.9999" in made.what, "not 1, where 1 is required"
    assert all(layer.kept for layer in records(found))


def test_layers_that_the_user_names_stay_in_float32():
    found = quantized(Residual().eval(), images(1)[0], calibration=images(4), keep_float=("inner", "he*"))
    assert {layer.name: layer.kept for layer in records(found)} == {
        "stem": "",
        "inner": "keep_float 'inner'",
        "head": "keep_float 'he*'",
    }
    assert all(len(layers(made)) == 1 for made in found.variants.values())
    convolutions = [node for node in found.variants["int8-static"].calls() if "conv2d" in str(node.target)]
    read = {node.meta["module"]: node.all_input_nodes[0] for node in convolutions}
    assert str(read["inner"].target) == "aten.relu.default", "it reads what is rounded for the residual sum"


def test_a_pattern_names_all_that_is_within():
    model = nn.Sequential(mlp(8, 8, 8), mlp(8, 8))
    found = quantized(model.eval(), rows(1, 8)[0], calibration=rows(4, 8), keep_float=("0",))
    assert [layer.name for layer in records(found) if layer.kept] == ["0.0", "0.2"]


def test_a_layer_is_known_by_its_own_name_after_a_norm_was_folded_into_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    found = quantized(model, images(1)[0], calibration=images(4))
    assert [layer.name for layer in records(found)] == ["0"]
    by_norm = quantized(model, images(1)[0], calibration=images(4), keep_float=("1",))
    assert records(by_norm)[0].kept == "keep_float '1'"


def test_a_pattern_that_matches_nothing_is_an_error():
    with pytest.raises(
        UsageError, match="keep_float 'body' matches no layer\n  why: the layers are: stem, inner, head"
    ):
        quantized(Residual().eval(), images(1)[0], calibration=images(2), keep_float=("body",))


class Heard(nn.Module):
    """Reads two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.seen, self.heard, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, image, audio):
        return self.head(self.seen(image) + self.heard(audio))


def test_layers_whose_range_the_data_does_not_show_stay_in_float32():
    model = Heard().eval()
    calls = [(torch.cat(rows(8 * i + 8, 16)[8 * i :]), torch.zeros(8, 16)) for i in range(16)]
    found = quantized(model, calls[0], calibration=calls)
    assert {layer.name: layer.kept for layer in records(found)} == {
        "seen": "",
        "heard": "its input was always zero in the calibration data",
        "head": "it depends on audio, which was always zero in the calibration data (add inputs where it is not)",
    }
    heard = [torch.cat(rows(16, 16)[:8]), torch.cat(rows(16, 16)[8:])]
    with torch.no_grad():
        (answer,), wanted = found.variants["int8-static"].module()(*heard), model(*heard)
    assert float((answer - wanted).norm() / wanted.norm()) < 0.04
    assert not any(layer.kept for layer in records(found, "int8")), "each call finds the ranges itself"


def test_scores_whose_range_the_data_does_not_show_stay_in_float32():
    def forward(self, x, y):
        return self.layer(torch.nn.functional.scaled_dot_product_attention(x, x + y, x))

    calls = [(torch.randn(1, 2, 8, 16, generator=seeded(i)), torch.zeros(1, 2, 8, 16)) for i in range(8)]
    found = quantized(Net(forward, layer=nn.Linear(16, 16)), calls[0], calibration=calls, wanted=("int8-static",))
    said = "it depends on arg1, which was always zero in the calibration data (add inputs where it is not)"
    assert [layer.kept for layer in records(found)] == ["", said]


class Stream(nn.Module):
    """A recurrent layer whose state is passed from call to call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(64, 256, batch_first=True), nn.Linear(256, 64)
        with torch.no_grad():
            self.lstm.bias_ih_l0[256:512] = 3  # of the gates that keep the cells

    def forward(self, x, hidden, cells):
        y, (hidden, cells) = self.lstm(x, (hidden, cells))
        return self.head(y), hidden, cells


def test_a_layer_behind_a_recurrent_one_is_accurate_for_states_that_the_data_does_not_show():
    model, zero = Stream().eval(), torch.zeros(1, 1, 256)
    chunks = [torch.randn(1, 2, 64, generator=seeded(i)) + 3 * torch.linspace(-1, 1, 64) for i in range(48)]
    data = [(x, zero, zero) for x in chunks]
    found = quantized(model, data[0], calibration=data, wanted=("int8-static",))
    fast, state = found.variants["int8-static"].module(), (zero, zero)
    assert not records(found)[0].kept
    with torch.no_grad():
        for x in chunks:
            (wanted, *after), (answer, *_) = model(x, *state), fast(x, *state)
            assert float((answer - wanted).norm() / wanted.norm()) < 0.02
            state = tuple(after)


def test_layers_further_behind_a_recurrent_one_are_quantized():
    model, zero = Stream().eval(), torch.zeros(1, 1, 256)
    model.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
    data = [(torch.randn(1, 2, 64, generator=seeded(i)), zero, zero) for i in range(48)]
    found = quantized(model, data[0], calibration=data, wanted=("int8-static",))
    assert [layer.kept for layer in records(found)] == ["", "", ""]


class Wide(nn.Module):
    """Its first layer adds up more products than fit in 32 bits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.long, self.short = nn.Linear(70_000, 8), nn.Linear(8, 8)
        nn.init.constant_(self.long.weight, 1e-5)

    def forward(self, x):
        return self.short(self.long(x))


def test_layers_whose_sums_may_not_fit_in_32_bits_stay_in_float32():
    calls = [torch.rand(1, 70_000, generator=seeded(i)) for i in range(8)]
    found = quantized(Wide().eval(), calls[0], calibration=calls)
    for variant in ("int8", "int8-static"):
        assert [layer.kept for layer in records(found, variant)] == ["its sums might not fit in 32 bits", ""]
        assert len(layers(found.variants[variant])) == 1


@pytest.mark.skipif(largest_weight() < 127, reason="int8 weights are not tried on this processor")
def test_int8_weights_take_layers_of_any_length():
    calls = [torch.rand(1, 70_000, generator=seeded(i)) for i in range(2)]
    found = quantized(Wide().eval(), calls[0], calibration=calls, wanted=("int8-weights",))
    assert not records(found, "int8-weights")[0].kept, "engines add up 128 products at a time"


def test_what_is_not_in_int8_has_the_precision_of_the_engines_other_ops():
    found = quantized(hard(), rows(1)[0], calibration=rows(16))
    engine = Candidate("openvino", variant="int8-static")
    in_bfloat16 = replace(engine, options=(("other_ops", "bf16"),))
    assert [layer.cells()[-2] for layer in found.layers_for(engine)] == ["int8", "int8", "fp32", "int8"]
    assert [layer.cells()[-2] for layer in found.layers_for(in_bfloat16)] == ["int8", "int8", "bf16", "int8"]
    assert "kept in bf16 (SQNR below 20 dB): 4" in lines(found.layers_for(in_bfloat16), "")


def decoder():
    """A convolution, and what only a precision other than int8 lowers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)).eval()


JUDGING = [{"max_drop": 0.01}, {"metric": "cosine"}, {"calibration": images(2)}]


@pytest.mark.parametrize("options", JUDGING, ids=lambda options: next(iter(options)))
def test_a_pattern_may_name_what_is_never_in_int8(options):
    found = quantized(decoder(), images(1)[0], wanted=("bf16",), keep_float=("1",), **options)
    assert (found.variants, found.layers) == ({}, {})
    both = quantized(decoder(), images(1)[0], wanted=("bf16", "int8"), keep_float=("1",), **options)
    assert [layer.kept for layer in records(both, "int8")] == [""]


def test_a_pattern_must_match_what_some_candidate_would_lower():
    with pytest.raises(UsageError, match="keep_float '1' matches no layer\n  why: the layers are: 0"):
        quantized(decoder(), images(1)[0], wanted=("int8",), keep_float=("1",), max_drop=0.01)
    with pytest.raises(UsageError, match="keep_float '2' matches no layer\n  why: the layers are: 0, 1"):
        quantized(decoder(), images(1)[0], wanted=("bf16", "int8"), keep_float=("2",), max_drop=0.01)


def test_what_is_judged_keeps_layers_in_float32_in_bfloat16():
    options = {"seconds": 0.1, "isolate": False, "cache": False}
    fast = tsopt.optimize(
        *(decoder(), images(1)[0]),
        **{"precision": "bf16", "max_drop": 0.01, "keep_float": ("1",), "backends": ("eager",), **options},
    )
    assert "eager?precision=bf16" in [row.key for row in fast.report.rows]


@pytest.mark.parametrize("needed", [2, 3, 5, 6, 9, 11, 12])
def test_no_more_layers_are_kept_than_the_inputs_that_judge_need(monkeypatch, needed):
    tried = []

    def judged(self, made, by):
        kept = 12 - len(layers(made))
        tried.append((kept, by is self._quick))
        enough = kept >= (2 if by is self._quick else needed)
        return Judgement(enough, 0.0, 1.0, "")

    monkeypatch.setattr(Measurements, "_judged", judged)
    found = quantized(mlp(*[8] * 13), rows(1, 8)[0], calibration=rows(64, 8), wanted=("int8-static",))
    assert sum(bool(layer.kept) for layer in records(found)) == needed
    assert len(tried) == len(set(tried))
    assert needed == 12 or (needed, False) in tried


def test_what_few_large_outputs_have_judged_is_not_judged_again(monkeypatch):
    tried = []
    plain = Measurements._judged

    def judged(self, made, by):
        tried.append(by.judge(made.module()).text)
        return plain(self, made, by)

    monkeypatch.setattr(Measurements, "_judged", judged)
    monkeypatch.setattr(answers, "MOST_BYTES", 4 * 8 * 4)
    limit = {"metric": "cosine", "max_drop": 0.5}
    quantized(mlp(8, 8), rows(1, 8)[0], calibration=rows(32, 8), wanted=("int8-static",), **limit)
    assert [" on 4 inputs" in text for text in tried] == [True]
